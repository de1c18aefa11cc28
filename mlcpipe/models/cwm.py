"""Code World Model (Meta 2025): Llama 3 with a window in three of four layers.

Models: CWM 32B.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlcpipe.models.apertus import DEFAULT_ROPE
from mlcpipe.nn.base_config import Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.config import layer_windows, rope_table
from mlcpipe.nn.decoder import decoder
from mlcpipe.nn.norm import NormSpec

DEFAULTS = Defaults(positions=131072, num_kv_heads=8, head_dim=128, norm=NormSpec(eps=1e-5), theta=1e6)
DEFAULT_WINDOW = 8192
PATTERN = 4


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a CWM config.json. Raises ConfigError for unsupported fields."""
    base = read_base(config, DEFAULTS, attention_bias=[None, False], original_max_position_embeddings=[None])
    window, mlp_bias = base.fields.integer("sliding_window", DEFAULT_WINDOW), base.fields.flag("mlp_bias", False)
    windows = layer_windows(base.fields, window, [i % PATTERN != 0 for i in range(base.num_layers)])
    rope = base.read_rope(rope_table(base.fields) or {**DEFAULT_ROPE, "rope_theta": 1e6, "factor": 16.0}, base.theta)
    return decoder(base, base.attentions(windows), lambda i: base.mlp(bias=mlp_bias), ropes=[rope])
