"""Qwen 3 (Yang et al. 2025): Qwen 2 with head norms instead of biases, and an explicit head size.

Models: Qwen3 0.6B to 32B, DeepSeek-R1-0528-Qwen3-8B, Qwen3-Embedding; the text of Qwen3-VL.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlcpipe.models.qwen2 import complete_gguf, upper_windows
from mlcpipe.nn.base_config import Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.decoder import decoder
from mlcpipe.nn.gguf import GgufFamily

DEFAULTS = Defaults(positions=32768, num_kv_heads=32, head_dim=128)


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a Qwen 3 config.json. Raises ConfigError for unsupported fields."""
    base = read_base(config, DEFAULTS, mlp_bias=[None, False])
    bias = base.fields.flag("attention_bias", False)
    specs = base.attentions(upper_windows(base), qkv_bias=bias, o_bias=bias, norm="head")
    return decoder(base, specs)


GGUF = GgufFamily("qwen3", complete_gguf, also=("qwen3vl",))
