"""OLMo 3 (Ai2 2025): OLMo 2 with a window in three of four layers; rope is scaled in the others only.

Models: OLMo 3 7B, 32B.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mlcpipe.models.gemma3_text import ropes_by_layer_type
from mlcpipe.models.olmo2 import DEFAULTS as OLMO2_DEFAULTS
from mlcpipe.models.olmo2 import GGUF as OLMO2_GGUF
from mlcpipe.models.qwen2 import complete_gguf
from mlcpipe.nn.base_config import read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.config import layer_windows
from mlcpipe.nn.decoder import decoder
from mlcpipe.nn.decoder_layer import POST_NORM
from mlcpipe.nn.gguf import GgufFile, read_windows

DEFAULTS = replace(OLMO2_DEFAULTS, theta=5e5)
DEFAULT_WINDOW = 4096
PATTERN = 4


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for an OLMo 3 config.json. Raises ConfigError for unsupported fields."""
    base = read_base(
        config,
        DEFAULTS,
        mlp_bias=[None, False],
        original_max_position_embeddings=[None],
        rope_local_base_freq=[None],
    )
    bias = base.fields.flag("attention_bias", False)
    window = base.fields.optional_integer("sliding_window", DEFAULT_WINDOW)
    windows = layer_windows(base.fields, window, [(i + 1) % PATTERN != 0 for i in range(base.num_layers)])
    return decoder(
        base,
        base.attentions(windows, qkv_bias=bias, o_bias=bias, norm="all"),
        form=POST_NORM,
        # transformers reads a `rope_theta` outside the tables for full layers only.
        ropes=ropes_by_layer_type(base, DEFAULTS.theta),
        rope_of=[0 if one is None else 1 for one in windows],
    )


def _complete_gguf(file: GgufFile, config: dict[str, Any]) -> None:
    complete_gguf(file, config)
    read_windows(file, config, PATTERN)
    sliding = {"rope_theta": file.number("rope.freq_base_swa", config["rope_theta"])}
    config["rope_parameters"] = {"sliding_attention": sliding}


GGUF = replace(
    OLMO2_GGUF, complete=_complete_gguf, applies=lambda file: bool(file.integer("attention.sliding_window", 0))
)
