"""Ministral 3 (Mistral AI 2025): Mistral with yarn, and queries that grow with the position.

Models: Ministral 3 3B, 8B, 14B (text).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mlcpipe.models.llama import complete_gguf
from mlcpipe.models.mistral import DEFAULTS as MISTRAL_DEFAULTS
from mlcpipe.nn.base_config import read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.config import Fields, layer_windows, rope_table
from mlcpipe.nn.decoder import decoder
from mlcpipe.nn.gguf import GgufFamily, GgufFile, read_growth
from mlcpipe.nn.norm import NormSpec

DEFAULTS = replace(MISTRAL_DEFAULTS, positions=262144, head_dim=128, norm=NormSpec(eps=1e-5))
DEFAULT_ROPE: Mapping[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a Ministral 3 config.json. Raises ConfigError for unsupported fields."""
    neutral = dict.fromkeys(("attention_bias", "mlp_bias"), [None, False])
    base = read_base(
        config, DEFAULTS, **neutral, partial_rotary_factor=[None, 1, 1.0], original_max_position_embeddings=[None]
    )
    window = base.fields.optional_integer("sliding_window", None)
    windows = layer_windows(base.fields, window, [window is not None] * base.num_layers, fixed=True)
    table = Fields(rope_table(base.fields) or DEFAULT_ROPE, "config.json rope_parameters")
    rope = base.read_rope(table.values, base.theta)
    beta, length = table.number("llama_4_scaling_beta"), table.integer("original_max_position_embeddings")
    specs = base.attentions(windows, growth=(beta, length, 0) if beta else None)
    return decoder(base, specs, ropes=[rope])


def _complete_gguf(file: GgufFile, config: dict[str, Any]) -> None:
    complete_gguf(file, config)
    read_growth(file, config)


GGUF = GgufFamily("mistral3", _complete_gguf, interleaved=True)
