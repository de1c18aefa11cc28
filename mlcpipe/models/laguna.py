"""Laguna (Poolside 2026): numbers of query heads and ropes by layer, outputs times a softplus, biased sigmoid experts.

Models: Laguna XS 2, S 2.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm.relax.frontend.nn import Tensor, op

from mlcpipe.errors import ConfigError
from mlcpipe.nn.base_config import BaseConfig, Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.config import Fields, layer_windows
from mlcpipe.nn.decoder import decoder
from mlcpipe.nn.gguf import ATTENTION, EXPERTS, MLP, MOE, GgufFamily, GgufFile, by_layer, read_experts, read_windows
from mlcpipe.nn.moe import Router, Routing, SparseMoE, expert_counts
from mlcpipe.nn.names import CheckpointNames
from mlcpipe.nn.rope import Rope

DEFAULTS = Defaults(positions=131072, num_kv_heads=8, head_dim=128, intermediate_size=8192)
NAMES = CheckpointNames(
    layer={
        "self_attn.gate_proj": "self_attn.g_proj",
        "mlp.gate.e_score_correction_bias": "mlp.experts.e_score_correction_bias",
    }
)
ROPES: Mapping[str, Mapping[str, Any]] = {
    "full_attention": {"rope_theta": 5e5, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_theta": 1e4, "partial_rotary_factor": 1.0},
}
MLPS = ("dense", "sparse")


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a Laguna config.json. Raises ConfigError for unsupported fields."""
    base = read_base(
        config, DEFAULTS, moe_apply_router_weight_on_input=[None, False], mlp_bias=[None, False], rope_scaling=[None]
    )
    fields, layers = base.fields, base.num_layers
    fields.refuse(gating=[None, True, "per-head", "per-element"], use_sliding_window=[None, False])
    fields.refuse(partial_rotary_factor=[None, 1, 1.0])  # it is in the ropes
    windows = layer_windows(fields, fields.integer("sliding_window", 512), [False] * layers)
    heads = _each(base, "num_attention_heads_per_layer", [base.num_heads] * layers)
    kinds = _each(base, "mlp_layer_types", ["dense"] + ["sparse"] * (layers - 1))
    if any(kind not in MLPS for kind in kinds):
        raise ConfigError("field mlp_layer_types", where=fields.where, expected=" or ".join(MLPS), found=kinds[:8])
    counts = [Fields({"num_attention_heads": one}).integer("num_attention_heads", high=4096) for one in heads]
    odd = next((count for count in counts if count % base.num_kv_heads), None)
    if odd is not None:
        expected = f"multiples of {base.num_kv_heads} KV heads"
        raise ConfigError("field num_attention_heads_per_layer", where=fields.where, expected=expected, found=odd)
    bias, gate = fields.flag("attention_bias", False), fields.get("gating", True)
    specs = [
        base.attention(
            window=window, num_heads=count, norm="head", qkv_bias=bias, o_bias=bias, gate_act="softplus",
            gate="element" if gate == "per-element" else "head",
        )
        for window, count in zip(windows, counts)
    ]  # fmt: skip
    return decoder(
        base,
        specs,
        lambda i: base.mlp() if kinds[i] == "dense" else _experts(base),
        ropes=ropes_of_kinds(base, ROPES, partial=1.0),
        rope_of=[0 if window is None else 1 for window in windows],
    )


def ropes_of_kinds(
    base: BaseConfig, usual: Mapping[str, Mapping[str, Any]], partial: float | None = None
) -> list[Rope]:
    """The rope of each kind of layer in `usual`, which has the family's own; `partial` as in `BaseConfig.read_rope`."""
    tables = Fields(base.fields.get("rope_parameters", usual), "config.json rope_parameters")
    tables.refuse(**{name: () for name in tables.values if name not in usual})
    return [
        base.read_rope(tables.table(kind), float(one["rope_theta"]), partial=partial) for kind, one in usual.items()
    ]


def _each(base: BaseConfig, name: str, default: list[Any]) -> list[Any]:
    """A list with a value for each layer."""
    values = base.fields.get(name, default)
    if not isinstance(values, list) or len(values) != base.num_layers:
        raise ConfigError(f"field {name}", where=base.fields.where, expected=f"{base.num_layers} values", found=values)
    return values


def _experts(base: BaseConfig) -> SparseMoE:
    fields = base.fields
    experts, chosen = expert_counts(fields, 256, 8)
    scale = fields.number("moe_routed_scaling_factor", 1.0)
    routing = Routing(experts, chosen, "sigmoid", normalize=True, bias=True, scale=scale)
    shared = fields.integer("shared_expert_intermediate_size", 512)
    width = fields.integer("moe_intermediate_size", 512)
    made = SparseMoE(base.hidden_size, width, routing, base.act, shared_width=shared)
    if cap := fields.number("moe_router_logit_softcapping", 0.0, low=0.0):
        made.gate = _CappedRouter(base.hidden_size, routing, cap)
    return made


class _CappedRouter(Router):
    """cap * tanh(logits / cap)."""

    def __init__(self, hidden_size: int, routing: Routing, cap: float) -> None:
        super().__init__(hidden_size, routing)
        self.cap = cap

    def forward(self, x: Tensor) -> Tensor:
        """x [m, hidden] -> f32[m, experts]."""
        y = super().forward(x)
        y = y if y.dtype == "float32" else op.astype(y, "float32")
        cap = Tensor.from_scalar(self.cap, "float32")
        return op.multiply(op.tanh(op.divide(y, cap)), cap)


def _complete_gguf(file: GgufFile, config: dict[str, Any]) -> None:
    """Full layers are the first of four where the file does not list them; gates have rows of heads or of elements."""
    layers, size = config["num_hidden_layers"], config["head_dim"]
    keys = ("attention.head_count", "feed_forward_length", "attention.head_count_kv")
    heads, widths, kv = (by_layer(file, key, layers) for key in keys)
    for key, values in zip(keys[1:], (widths, kv)):
        if len(set(values)) > 1:
            raise file.error(key, "one number for all layers", values[:8])
    gate = file.rows("blk.0.attn_gate.weight")
    if gate not in (heads[0], heads[0] * size):
        raise file.error(keys[0], f"{gate} or {gate // size}, by the rows of blk.0.attn_gate.weight", heads[0])
    config |= {
        "intermediate_size": widths[0],
        "num_attention_heads": heads[0],
        "num_attention_heads_per_layer": heads,
        "num_key_value_heads": kv[0],
        "gating": "per-head" if gate == heads[0] else "per-element",
    }
    read_experts(file, config, "sigmoid")
    if file.integer("expert_shared_count", 1) != 1 or not file.get("expert_weights_norm", True):
        raise file.error("expert_shared_count", "1, and expert_weights_norm true")
    dense = min(file.integer("leading_dense_block_count", 0), layers)
    config["mlp_layer_types"] = ["dense"] * dense + ["sparse"] * (layers - dense)
    config["shared_expert_intermediate_size"] = file.integer("expert_shared_feed_forward_length")
    config["moe_routed_scaling_factor"] = file.number("expert_weights_scale", 1.0)
    config["attention_bias"] = "blk.0.attn_q.bias" in file
    if isinstance(file.get("attention.sliding_window_pattern", 4), int):
        window = config["sliding_window"] = file.integer("attention.sliding_window", 0) or None
        period = file.integer("attention.sliding_window_pattern", 4)
        slides = [window is not None and period > 0 and i % period > 0 for i in range(layers)]
        config["layer_types"] = [f"{'sliding' if slide else 'full'}_attention" for slide in slides]
    else:
        read_windows(file, config, 4)
    theta = config.pop("rope_theta")
    full = config.pop("rope_scaling", None) or {"rope_type": "default"}
    config["rope_parameters"] = {
        "full_attention": full | {"rope_theta": theta, "partial_rotary_factor": config.pop("partial_rotary_factor")},
        "sliding_attention": {
            "rope_type": "default",
            "rope_theta": file.number("rope.freq_base_swa", theta),
            "partial_rotary_factor": file.integer("rope.dimension_count_swa", size) / size,
        },
    }


GGUF = GgufFamily(
    "laguna",
    _complete_gguf,
    {**ATTENTION, **MLP, **MOE, "attn_gate": "self_attn.gate_proj", "ffn_norm": "post_attention_layernorm"},
    EXPERTS,
    rope="partial",
    by_layer=True,
)
