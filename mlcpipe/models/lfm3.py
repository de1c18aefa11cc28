"""LFM3 (Liquid AI 2026): LFM2 with sliding and full attention, gates of heads, norms before and after each block.

Models: LFM3 1.7B.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mlcpipe.models.gemma4_text import ROPE_KINDS
from mlcpipe.models.lfm2 import DEFAULTS as LFM2_DEFAULTS
from mlcpipe.models.lfm2 import NAMES as LFM2_NAMES
from mlcpipe.nn.attention_spec import AttentionSpec
from mlcpipe.nn.base_config import Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.config import Fields, layer_kinds
from mlcpipe.nn.decoder import Mixer, decoder
from mlcpipe.nn.decoder_layer import PRE_NORM
from mlcpipe.nn.short_conv import ShortConv

DEFAULTS: Defaults = replace(LFM2_DEFAULTS, num_kv_heads=4, head_dim=128, intermediate_size=7680)
_OWN = ("self_attn.q_norm", "self_attn.k_norm", "self_attn.o_proj")  # which LFM2 calls otherwise
NAMES = replace(LFM2_NAMES, layer={name: of for name, of in LFM2_NAMES.layer.items() if name not in _OWN})
FULL, SLIDING, CONVOLVES = "full_attention", "sliding_attention", "conv"
ROPES: Mapping[str, Mapping[str, Any]] = {
    FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}
# What published files say and no model of the family does otherwise.
FIXED: Mapping[str, list[Any]] = {
    "hidden_act": [None, "silu"],
    "mlp_bias": [None, False],
    "partial_rotary_factor": [None, 1, 1.0],  # it is in the ropes
    "rope_scaling": [None],
}


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for an LFM3 config.json. Raises ConfigError for unsupported fields."""
    base = read_base(config, DEFAULTS, **FIXED)
    fields, count = base.fields, base.num_layers
    bias, taps = fields.flag("conv_bias", False), fields.integer("conv_L_cache", 7, low=2, high=64)
    of_projections = fields.flag("attention_bias", False)
    gate = "head" if fields.flag("use_attention_gate", True) else ""
    windows = {FULL: None, SLIDING: fields.integer("sliding_window", 256)}
    kinds = layer_kinds(fields, count, {kind: kind for kind in (FULL, SLIDING, CONVOLVES)}) or [
        FULL if i % 4 == 2 else SLIDING if i % 4 == 0 and i else CONVOLVES for i in range(count)
    ]

    def mixer(i: int, kind: str) -> AttentionSpec | Mixer:
        if kind == CONVOLVES:
            return Mixer("conv", ShortConv(base.hidden_size, taps, i, bias))
        options = {"qkv_bias": of_projections, "o_bias": of_projections, "gate": gate}
        return base.attention(window=windows[kind], norm="head", **options)

    tables = Fields(fields.table("rope_parameters"), "config.json rope_parameters")
    tables.refuse(**{name: () for name in tables.values if name not in ROPES})
    sandwich = fields.flag("use_sandwich_norm", True)
    return decoder(
        base,
        [mixer(i, kind) for i, kind in enumerate(kinds)],
        form=replace(PRE_NORM, after_mixer="post_operator_norm", after_mlp="post_ffn_norm") if sandwich else PRE_NORM,
        ropes=[base.read_rope(tables.get(kind, of), 1e4, partial=1.0, kinds=ROPE_KINDS) for kind, of in ROPES.items()],
        rope_of=[int(kind == SLIDING) for kind in kinds],
    )
