"""EXAONE 4 (LG AI Research 2025): norms of heads and after blocks; full layers beside sliding ones have no rope.

Models: EXAONE 4.0 1.2B, 32B.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlcpipe.nn.base_config import BaseConfig, Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.config import layer_windows
from mlcpipe.nn.decoder import decoder
from mlcpipe.nn.decoder_layer import POST_NORM
from mlcpipe.nn.gguf import ATTENTION, MLP, POST_NORMS, GgufFamily, GgufFile, read_windows
from mlcpipe.nn.norm import NormSpec

DEFAULTS = Defaults(positions=2048, num_kv_heads=32, norm=NormSpec(eps=1e-5))
DEFAULT_WINDOW = 4096
DEFAULT_PATTERN = 4


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for an EXAONE 4 config.json. Raises ConfigError for unsupported fields."""
    base = read_base(config, DEFAULTS, attention_bias=[None, False], mlp_bias=[None, False])
    windows, rotated = hybrid_windows(base)
    return decoder(base, base.attentions(windows, norm="head"), form=POST_NORM, rotated=rotated)


def hybrid_windows(base: BaseConfig) -> tuple[tuple[int | None, ...], list[bool]]:
    """The window of each layer, and which have RoPE: all, or those with a window if there are such."""
    fields = base.fields
    window, slides = fields.optional_integer("sliding_window", DEFAULT_WINDOW), [False] * base.num_layers
    if window is not None and fields.get("layer_types") is None:
        pattern = fields.integer("sliding_window_pattern", DEFAULT_PATTERN)
        slides = [(i + 1) % pattern != 0 for i in range(base.num_layers)]
    windows = layer_windows(fields, window, slides)
    return windows, [window is None or one is not None for one in windows]


def _complete_gguf(file: GgufFile, config: dict[str, Any]) -> None:
    read_windows(file, config, DEFAULT_PATTERN)


GGUF = GgufFamily("exaone4", _complete_gguf, {**ATTENTION, **MLP, **POST_NORMS})
