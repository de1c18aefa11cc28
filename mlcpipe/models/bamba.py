"""Bamba (IBM, Princeton, CMU, UIUC 2024): Mamba-2 in most layers, attention with RoPE over half of each head in others.

Models: Bamba 9B v1, v2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlcpipe.errors import ConfigError
from mlcpipe.nn.base_config import BaseConfig, Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.decoder import Mixer, decoder
from mlcpipe.nn.mamba2 import Mamba2, read_mamba2
from mlcpipe.nn.names import CheckpointNames
from mlcpipe.nn.norm import NormSpec

DEFAULTS = Defaults(positions=262_144, num_kv_heads=8, norm=NormSpec(eps=1e-5), intermediate_size=14336)
NAMES = CheckpointNames(
    top={"norm": "final_layernorm"},
    layer={"mlp": "feed_forward", "post_attention_layernorm": "pre_ff_layernorm"},
)


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a Bamba config.json. Raises ConfigError for unsupported fields."""
    base = read_base(config, DEFAULTS, hidden_act=[None, "silu"], layer_types=[None], partial_rotary_factor=[None, 0.5])
    fields, attends = base.fields, _attending(base)
    bias, mlp_bias = fields.flag("attention_bias", False), fields.flag("mlp_bias", False)
    attention = base.attention(qkv_bias=bias, o_bias=bias)
    inner = fields.integer("mamba_expand", 2, high=64) * base.hidden_size
    scan = read_mamba2(fields, base.hidden_size, inner, eps=base.norm.eps)
    mixers = [attention if i in attends else Mixer("mamba", Mamba2(scan, i)) for i in range(base.num_layers)]
    return decoder(base, mixers, lambda i: base.mlp(bias=mlp_bias), ropes=[base.rope(partial=0.5)])


def _attending(base: BaseConfig) -> set[int]:
    """The layers that attend."""
    listed = base.fields.get("attn_layer_indices", [])
    if not isinstance(listed, list) or any(type(i) is not int for i in listed):
        raise ConfigError("field attn_layer_indices", where=base.fields.where, expected="numbers of layers")
    return set(listed)
