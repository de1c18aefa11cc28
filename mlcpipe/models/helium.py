"""Helium 1 (Kyutai 2025): Llama with rope over pairs.

Models: Helium 1 2B.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlcpipe.nn.base_config import Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.decoder import decoder
from mlcpipe.nn.norm import NormSpec

DEFAULTS = Defaults(positions=4096, num_kv_heads=20, head_dim=128, norm=NormSpec(eps=1e-8), theta=1e5)


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a Helium config.json. Raises ConfigError for unsupported fields."""
    base = read_base(config, DEFAULTS)
    bias, mlp_bias = base.fields.flag("attention_bias", False), base.fields.flag("mlp_bias", False)
    specs = base.attentions(qkv_bias=bias, interleaved=base.head_dim)
    return decoder(base, specs, lambda i: base.mlp(bias=mlp_bias))
