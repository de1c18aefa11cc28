"""Phi-3, 3.5 and 4 (Abdin et al. 2024): fused q, k, v; fused gate and up; longrope.

Models: Phi-3, Phi-3.5-mini, Phi-4 14B, Phi-4-mini 3.8B.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlcpipe.nn.base_config import BaseConfig, Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.config import layer_windows, rope_table
from mlcpipe.nn.decoder import decoder
from mlcpipe.nn.gguf import PRE_NORM, GgufFamily, GgufFile
from mlcpipe.nn.mlp import FusedGatedMLP
from mlcpipe.nn.norm import NormSpec
from mlcpipe.nn.rope import Rope, read_rope

DEFAULTS = Defaults(positions=4096, norm=NormSpec(eps=1e-5))
DEFAULT_ORIGINAL_POSITIONS = 4096
# Early names of longrope; its authors' code also treats `yarn` as longrope.
_RENAMED = {"su": "longrope", "yarn": "longrope"}


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a Phi-3 config.json. Raises ConfigError for unsupported fields."""
    base = read_base(config, DEFAULTS, attention_bias=[None, False], mlp_bias=[None, False])
    window = base.fields.optional_integer("sliding_window", None)
    windows = layer_windows(base.fields, window, [window is not None] * base.num_layers, fixed=True)
    return decoder(
        base,
        base.attentions(windows, fused="parts"),
        lambda i: FusedGatedMLP(base.hidden_size, base.intermediate_size, base.act),
        ropes=[_rope(base)],
    )


def _rope(base: BaseConfig) -> Rope:
    """Longrope's switch is the top-level `original_max_position_embeddings`, regardless of the table."""
    table = dict(rope_table(base.fields))
    kind = table.get("rope_type", table.get("type"))
    if isinstance(kind, str):
        table["rope_type"] = _RENAMED.get(kind, kind)
    return read_rope(
        table,
        base.head_dim,
        base.positions,
        theta=base.theta,
        original=base.fields.integer("original_max_position_embeddings", DEFAULT_ORIGINAL_POSITIONS, low=2),
        partial=base.fields.number("partial_rotary_factor", 1.0, low=0.0, high=1.0),
        kinds=("default", "longrope"),
    )


def _complete_gguf(file: GgufFile, config: dict[str, Any]) -> None:
    rotated = file.integer("rope.dimension_count", config["head_dim"])
    config["partial_rotary_factor"] = rotated / config["head_dim"]
    config["sliding_window"] = file.integer("attention.sliding_window", 0) or None
    original = file.integer("rope.scaling.original_context_length", config["max_position_embeddings"])
    config["original_max_position_embeddings"] = original


_NAMES = {**PRE_NORM, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
GGUF = GgufFamily("phi3", _complete_gguf, _NAMES, rope="longrope")
