"""LongCat Flash (Meituan 2025): two latent attentions and MLPs in a layer, beside experts of which some do nothing.

Models: LongCat-Flash-Chat 560B-A27B, LongCat-Flash-Thinking.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tvm import te, tirx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op

from mlcpipe.models.deepseek_v3 import latent_spec, read_latent_base
from mlcpipe.nn.base_config import BaseConfig, Defaults
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.config import layer_windows
from mlcpipe.nn.latent_attention import LatentAttention, LatentSpec
from mlcpipe.nn.moe import Routing, SparseMoE, expert_counts, route
from mlcpipe.nn.names import CheckpointNames
from mlcpipe.nn.norm import NormSpec
from mlcpipe.nn.step_states import StepStates

DEFAULTS = Defaults(
    positions=131072, norm=NormSpec(eps=1e-5), theta=1e7, intermediate_size=12288, num_layers=28,
    names={"num_hidden_layers": "num_layers", "intermediate_size": "ffn_hidden_size"},
)  # fmt: skip
NAMES = CheckpointNames(
    unused=("mtp.",),
    layer={
        "mlp.gate": "mlp.router.classifier",
        "mlp.gate.e_score_correction_bias": "mlp.router.e_score_correction_bias",
    },
)
# What published files say and no model of the family does otherwise.
FIXED: Mapping[str, list[Any]] = {
    "attention_method": [None, "MLA"],
    "mla_scale_kv_lora": [None, True],
    "mla_scale_q_lora": [None, True],
    "norm_topk_prob": [None, False],
    "rope_interleave": [None, True],
    "router_bias": [None, False],
    "zero_expert_type": [None, "identity"],
}


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a LongCat Flash config.json. Raises ConfigError for unsupported fields."""
    base = read_latent_base(config, DEFAULTS, FIXED)
    fields, count = base.fields, base.num_layers
    fields.refuse(num_hidden_layers=[None, count, 2 * count])  # transformers counts halves of layers
    layer_windows(fields, None, [False] * count, fixed=True)
    q_rank = fields.integer("q_lora_rank", 1536)
    spec = latent_spec(base, q_rank=q_rank)
    fields.refuse(qk_head_dim=[None, spec.nope + spec.rope])
    grown = {"q_rank": q_rank, "scale": spec.scale * (base.hidden_size / q_rank) ** 0.5}  # queries grow, as scores do
    spec = replace(spec, **grown, vector_scale=(base.hidden_size / spec.kv_rank) ** 0.5)
    experts, chosen = expert_counts(fields, 512, 12)
    idle = fields.optional_integer("zero_expert_num", 256, low=0, high=4096) or 0
    scale = fields.number("routed_scaling_factor", 6.0)
    routing = Routing(experts + idle, chosen, "softmax", scale=scale, bias=True)
    layers = [LongcatLayer(base, spec, routing, experts, i) for i in range(count)]
    return CausalLM(base.facts([base.rope()]), layers, base.norm)


class LongcatLayer(nn.Module):
    """Twice x += attention(norm(x)), x += mlp(norm(x)); experts read what the first MLP reads, and add at the end."""

    def __init__(self, base: BaseConfig, latent: LatentSpec, routing: Routing, experts: int, layer: int) -> None:
        hidden, width = base.hidden_size, base.fields.integer("expert_ffn_hidden_size", 2048)
        self.self_attn = nn.ModuleList([LatentAttention(latent, 2 * layer + i) for i in range(2)])
        self.mlps = nn.ModuleList([base.mlp() for _ in range(2)])
        self.input_layernorm = nn.ModuleList([base.norm(hidden) for _ in range(2)])
        self.post_attention_layernorm = nn.ModuleList([base.norm(hidden) for _ in range(2)])
        self.mlp = SomeIdle(hidden, width, routing, base.act, experts)
        # transformers stores matrices of experts that do nothing.
        self.unused = tuple(f"mlp.experts.{e}." for e in range(experts, routing.experts))

    def forward(self, x: Tensor, kv: StepStates, cos: Tensor, sin: Tensor) -> Tensor:
        """x [m, hidden] -> [m, hidden]."""
        added = x
        for i in range(2):
            x = op.add(x, self.self_attn[i](self.input_layernorm[i](x), kv, cos, sin))
            fed = self.post_attention_layernorm[i](x)
            added = self.mlp(fed) if i == 0 else added
            x = op.add(x, self.mlps[i](fed))
        return op.add(x, added)


class SomeIdle(SparseMoE):
    """A mixture whose first `experts` are MLPs, and the others of the routing return what they read."""

    def __init__(self, hidden_size: int, width: int, routing: Routing, act: str, experts: int) -> None:
        super().__init__(hidden_size, width, routing, act, experts=experts)
        self.experts = experts

    def forward(self, x: Tensor) -> Tensor:
        """x [m, hidden] -> [m, hidden]."""
        return self.mixed(x, *route(self.gate(x), self.routing, self.gate.e_score_correction_bias))

    def mix(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """As `Mixture.mixed`."""
        outer = self.chosen(x, ids)  # of the idle ones, what the last MLP makes

        def sum_(weights: te.Tensor, ids: te.Tensor, outer: te.Tensor, x: te.Tensor) -> te.Tensor:
            top = int(ids.shape[1])

            def part(i: tirx.Var, j: tirx.Var, t: int) -> tirx.PrimExpr:
                value = tirx.if_then_else(ids[i, t] < self.experts, outer[i * top + t, j], x[i, j])
                return weights[i, t] * value.astype("float32")

            def element(i: tirx.Var, j: tirx.Var) -> tirx.PrimExpr:
                total = part(i, j, 0)
                for t in range(1, top):
                    total = total + part(i, j, t)
                return total.astype(x.dtype)

            return te.compute(x.shape, element, name="moe_combine")

        return op.tensor_expr_op(sum_, "moe_combine", [weights, ids, outer, x])
