"""SmolLM 3 (Hugging Face 2025): Llama without rotary positions in every fourth layer.

Models: SmolLM3 3B.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlcpipe.errors import ConfigError
from mlcpipe.models.llama import complete_gguf
from mlcpipe.models.qwen2 import window_in_use
from mlcpipe.nn.base_config import BaseConfig, Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.config import layer_windows
from mlcpipe.nn.decoder import decoder
from mlcpipe.nn.gguf import GgufFamily

DEFAULTS = Defaults(positions=32768, num_kv_heads=4, theta=2e6, tied=True)
DEFAULT_INTERVAL = 4


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a SmolLM 3 config.json. Raises ConfigError for unsupported fields."""
    base = read_base(config, DEFAULTS)
    fields = base.fields
    bias, mlp_bias = fields.flag("attention_bias", False), fields.flag("mlp_bias", False)
    rotated, window = rotated_layers(base), window_in_use(base, default=None)
    windows = layer_windows(fields, window, [window is not None and not one for one in rotated])
    specs = base.attentions(windows, qkv_bias=bias, o_bias=bias)
    return decoder(base, specs, lambda i: base.mlp(bias=mlp_bias), rotated=rotated)


def rotated_layers(base: BaseConfig) -> list[bool]:
    """Whether each layer has rotary positions: `no_rope_layers` has a 1 for those that do."""
    count, stated = base.num_layers, base.fields.get("no_rope_layers")
    interval = base.fields.integer("no_rope_layer_interval", DEFAULT_INTERVAL)
    if stated in (None, []):
        return [(i + 1) % interval != 0 for i in range(count)]
    if not isinstance(stated, list) or len(stated) != count or any(one not in (0, 1) for one in stated):
        raise ConfigError("field no_rope_layers", where=base.fields.where, expected=f"{count} of 0 and 1")
    return [bool(one) for one in stated]


# llama.cpp, too, leaves every fourth layer out; its files do not say so.
GGUF = GgufFamily("smollm3", complete_gguf, interleaved=True)
