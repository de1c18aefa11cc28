"""Mistral 7B and derivatives (Jiang et al. 2023): Llama with a sliding window in all layers or none.

Models: Mistral 7B, Nemo 12B, Small 24B.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlcpipe.models.llama import complete_gguf
from mlcpipe.nn.base_config import Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.config import layer_windows
from mlcpipe.nn.decoder import decoder
from mlcpipe.nn.gguf import GgufFamily

DEFAULTS = Defaults(positions=4096 * 32, num_kv_heads=8)
DEFAULT_WINDOW = 4096


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a Mistral config.json. Raises ConfigError for unsupported fields."""
    base = read_base(config, DEFAULTS, attention_bias=[None, False], mlp_bias=[None, False])
    window = base.fields.optional_integer("sliding_window", DEFAULT_WINDOW)
    windows = layer_windows(base.fields, window, [window is not None] * base.num_layers, fixed=True)
    return decoder(base, base.attentions(windows))


GGUF = GgufFamily(
    "llama",
    complete_gguf,
    applies=lambda file: bool(file.integer("attention.sliding_window", 0)) and not file.integer("expert_count", 0),
    interleaved=True,
)
