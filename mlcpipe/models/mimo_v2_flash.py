"""MiMo V2 Flash (Xiaomi 2025): narrow values; sliding layers with sinks and twice the KV heads; mixtures.

The layer that drafts is dense and slides; its tensors' names and sizes are those of vLLM's `mimo_v2_mtp.py`.

Models: MiMo-V2-Flash.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlcpipe.models.deepseek_v3 import ROUTER
from mlcpipe.models.glm4_moe import grouped_routing
from mlcpipe.models.glm4_moe_lite import dense_after, sparse_where_listed
from mlcpipe.nn.attention_spec import AttentionSpec
from mlcpipe.nn.base_config import BaseConfig, Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.config import Fields, layer_kinds, layer_windows
from mlcpipe.nn.decoder import decoder
from mlcpipe.nn.moe import expert_counts
from mlcpipe.nn.names import CheckpointNames
from mlcpipe.nn.norm import NormSpec

DEFAULTS = Defaults(
    positions=131072, num_kv_heads=4, head_dim=192, norm=NormSpec(eps=1e-5), theta=5e6, intermediate_size=16384,
    names={"rms_norm_eps": "layernorm_epsilon"},
)  # fmt: skip
_DRAFTS = "model.mtp.layers.0"  # of several, one for each token, the first
NAMES = CheckpointNames(
    unused=("mtp.",),
    top={
        "mtp": _DRAFTS,
        "mtp.layer": _DRAFTS,
        "mtp.layer.post_attention_layernorm": f"{_DRAFTS}.pre_mlp_layernorm",
        "mtp.norm": f"{_DRAFTS}.final_layernorm",
    },
    layer={"self_attn.sinks": "self_attn.attention_sink_bias"},
)
KINDS = ("sliding_attention", "full_attention")
# What the first files say and no model of the family does otherwise.
FIXED: Mapping[str, list[Any]] = {
    **{name: values for name, values in ROUTER.items() if name != "moe_layer_freq"},
    "add_full_attention_sink_bias": [None, False],
    "add_swa_attention_sink_bias": [None, True],
    "attention_chunk_size": [None, 128],  # of another program
    "mlp_bias": [None, False],
    "n_shared_experts": [None, 0],
    "rope_scaling": [None],
}


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a MiMo V2 Flash config.json. Raises ConfigError for unsupported fields."""
    base = read_base(config, DEFAULTS, **FIXED)
    fields, count = base.fields, base.num_layers
    fields.refuse(moe_layer_freq=[None, [int(i > 0) for i in range(count)]])
    slides = layer_kinds(fields, count, {0: False, 1: True}, name="hybrid_layer_pattern")
    before = fields.optional_integer("sliding_window_size", None)  # without the query itself
    window = fields.integer("sliding_window", 129) if before is None else before + 1
    windows = layer_windows(fields, window, slides or [i > 0 and (i + 1) % 6 > 0 for i in range(count)])
    routing = grouped_routing(fields, *expert_counts(fields, 256, 8), normalize=True)
    tables = Fields(fields.table("rope_parameters"), "config.json rope_parameters")
    tables.refuse(**{name: () for name in tables.values if name not in KINDS})
    thetas = fields.number("swa_rope_theta", 1e4, low=1.0), base.theta
    return decoder(
        base,
        [_attention(base, one) for one in windows],
        dense_after(base, sparse_where_listed(base, routing, dense=1, shared=0, width=2048)),
        ropes=[base.read_rope(tables.table(kind), theta, partial=0.334) for kind, theta in zip(KINDS, thetas)],
        rope_of=[1 if one is None else 0 for one in windows],
        drafts=_attention(base, window),
    )


def _attention(base: BaseConfig, window: int | None) -> AttentionSpec:
    """The attention of a layer; one that slides has sinks and more KV heads."""
    fields, heads, slides = base.fields, base.num_kv_heads, window is not None
    value = fields.integer("v_head_dim", 128, high=base.head_dim)
    more = fields.integer("swa_num_key_value_heads", 2 * heads, high=base.num_heads)
    same = {"swa_num_attention_heads": base.num_heads, "swa_head_dim": base.head_dim, "swa_v_head_dim": value}
    fields.refuse(**{name: [None, size] for name, size in same.items()})
    scale = fields.optional_number("attention_value_scale", 0.707, low=-1e4)
    return base.attention(
        window=window, num_kv_heads=more if slides else heads, sinks=slides,
        qkv_bias=fields.flag("attention_bias", False), value_dim=value if value < base.head_dim else 0,
        value_scale=1.0 if scale is None else scale,
    )  # fmt: skip
