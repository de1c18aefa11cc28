"""gpt-oss (OpenAI 2025): attention with sinks and a window in every second layer, experts with biases and clamps.

Models: gpt-oss 20B, 120B.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from tvm import te, tirx
from tvm.relax.frontend.nn import Tensor, op

from mlcpipe.nn.base_config import Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.config import layer_windows, rope_table
from mlcpipe.nn.decoder import decoder
from mlcpipe.nn.gguf import ATTENTION, EXPERTS, GgufFamily, GgufFile, read_experts
from mlcpipe.nn.linear import ExpertLinear, Linear
from mlcpipe.nn.moe import Mixture, Routing, combine, expert_counts, route
from mlcpipe.nn.norm import NormSpec

DEFAULTS = Defaults(positions=1 << 17, num_kv_heads=8, head_dim=64, norm=NormSpec(eps=1e-5), theta=150_000.0)
DEFAULT_WINDOW = 128
DEFAULT_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a gpt-oss config.json. Raises ConfigError for unsupported fields."""
    base = read_base(config, DEFAULTS, mlp_bias=[None, False])
    fields, layers = base.fields, base.num_layers
    fields.refuse(hidden_act=[None, "silu"])  # transformers stores it but never applies it
    rope = base.rope() if rope_table(fields) else base.read_rope(DEFAULT_ROPE, base.theta)
    window = fields.optional_integer("sliding_window", DEFAULT_WINDOW)
    windows = layer_windows(fields, window, [i % 2 == 0 for i in range(layers)])
    experts, chosen = expert_counts(fields, experts=128, chosen=4)
    alpha = fields.number("swiglu_alpha", 1.702)
    limit = fields.number("swiglu_limit", 7.0, low=1e-6)
    bias = fields.flag("attention_bias", True)
    specs = base.attentions(windows, qkv_bias=bias, o_bias=bias, sinks=True)

    def mlp(i: int) -> ClampedMoE:
        return ClampedMoE(base.hidden_size, base.intermediate_size, experts, chosen, alpha=alpha, limit=limit)

    return decoder(base, specs, mlp, ropes=[rope])


class ClampedMoE(Mixture):
    """Sum of weight_e * (down_e(act(gate_e(x), up_e(x))) + bias_e) over the chosen experts e: [m, hidden] -> the same.

    act(g, u) = (u' + 1) * g' * sigmoid(alpha * g'), where g' = min(g, limit) and u' is u within +- limit. Gate and up
    have biases, too. Weights are the softmax over the chosen experts.
    """

    def __init__(self, hidden_size: int, width: int, experts: int, chosen: int, *, alpha: float, limit: float) -> None:
        self.width, self.chosen, self.alpha, self.limit = width, chosen, alpha, limit
        self.routing = Routing(experts, chosen, normalize=True)
        self.router = Linear(hidden_size, experts, bias=True, quantize=False)

        def names(*parts: str) -> list[list[str]]:
            return [[f"experts.{e}.{part}_proj" for part in parts] for e in range(experts)]

        self.experts_gate_up = ExpertLinear(experts, hidden_size, 2 * width, names("gate", "up"), bias=True)
        self.experts_down = ExpertLinear(experts, width, hidden_size, names("down"), bias=True)
        for layer in (self.experts_gate_up, self.experts_down):
            layer.weight.attrs["reads"] = Fraction(chosen, experts)

    def forward(self, x: Tensor) -> Tensor:
        """x [m, hidden] -> [m, hidden]."""
        return self.mixed(x, *route(self.router(x), self.routing))

    def mix(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """As `Mixture.mixed`."""
        inner = self.experts_gate_up(x, ids, shared=True)
        inner = op.tensor_expr_op(self._act, "clamped_gate", [inner, self.experts_gate_up.bias, ids])
        outer = self.experts_down(inner, ids, shared=False)
        return op.tensor_expr_op(combine, "moe_combine", [weights, outer, self.experts_down.bias, ids])

    def _act(self, h: te.Tensor, bias: te.Tensor, ids: te.Tensor) -> te.Tensor:
        """h [m * chosen, 2 * width], gate columns first, of experts `ids` [m, chosen] -> [m * chosen, width]."""
        width, top = self.width, self.chosen

        def f32(value: float) -> tirx.PrimExpr:
            return tirx.const(value, "float32")

        def element(i: tirx.Var, j: tirx.Var) -> tirx.PrimExpr:
            first = ids[i // top, i % top].astype("int64") * (2 * width)
            gate, up = (h[i, at].astype("float32") + bias[first + at].astype("float32") for at in (j, j + width))
            # min(a, b) is `a < b ? a : b`: with NaN as b, NaN.
            gate = tirx.min(f32(self.limit), gate)
            up = tirx.max(f32(-self.limit), tirx.min(f32(self.limit), up))
            return ((up + f32(1.0)) * gate / (f32(1.0) + tirx.exp(gate * f32(-self.alpha)))).astype(h.dtype)

        return te.compute((h.shape[0], width), element, name="clamped_gate")


def _complete_gguf(file: GgufFile, config: dict[str, Any]) -> None:
    """The file says neither which layers slide, every second one, nor that the ramp of YaRN is not rounded."""
    read_experts(file, config)
    config["intermediate_size"] = file.integer("expert_feed_forward_length", config["intermediate_size"])
    config["sliding_window"] = file.integer("attention.sliding_window")
    config["attention_bias"] = "blk.0.attn_q.bias" in file
    config["rope_scaling"] = {**(config.get("rope_scaling") or {"rope_type": "default"}), "truncate": False}


_NAMES = {
    **ATTENTION,
    "attn_sinks": "self_attn.sinks",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
}
GGUF = GgufFamily("gpt-oss", _complete_gguf, _NAMES, EXPERTS)
