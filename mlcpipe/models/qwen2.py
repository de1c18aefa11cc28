"""Qwen 2 and 2.5 (Yang et al. 2024): Llama with biases on q, k and v; upper layers may have a window.

Models: Qwen2.5 0.5B to 72B, Qwen2.5-Coder, QwQ, DeepSeek-R1-Distill-Qwen; the text of Qwen2-VL and Qwen2.5-VL.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlcpipe.nn.base_config import BaseConfig, Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.config import layer_windows
from mlcpipe.nn.decoder import decoder
from mlcpipe.nn.gguf import GgufFamily, GgufFile

DEFAULTS = Defaults(positions=32768, num_kv_heads=32)
DEFAULT_WINDOW = 4096
DEFAULT_FULL_LAYERS = 28


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a Qwen 2 config.json. Raises ConfigError for unsupported fields."""
    base = read_base(config, DEFAULTS, attention_bias=[None], mlp_bias=[None, False])
    return decoder(base, base.attentions(upper_windows(base), qkv_bias=True))


def upper_windows(base: BaseConfig) -> tuple[int | None, ...]:
    """The window of each layer: from `layer_types`, else layers from `max_window_layers` on slide."""
    window = window_in_use(base)
    full = base.fields.integer("max_window_layers", DEFAULT_FULL_LAYERS, low=0)
    return layer_windows(base.fields, window, [window is not None and i >= full for i in range(base.num_layers)])


def window_in_use(base: BaseConfig, default: int | None = DEFAULT_WINDOW) -> int | None:
    """`sliding_window` if `use_sliding_window` is true."""
    if not base.fields.flag("use_sliding_window", False):
        return None
    return base.fields.optional_integer("sliding_window", default)


def complete_gguf(file: GgufFile, config: dict[str, Any]) -> None:
    """The fields of GGUF files of families like Qwen 3 and OLMo 2."""
    config["attention_bias"] = "blk.0.attn_q.bias" in file


GGUF = GgufFamily("qwen2", also=("qwen2vl",))
