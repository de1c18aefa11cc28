"""Gemma 1 and CodeGemma (Gemma Team 2024): Llama with scaled embeddings and norms that store their weight minus 1.

Models: Gemma 2B, 7B; CodeGemma.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mlcpipe.models.gemma2 import DEFAULTS as GEMMA2_DEFAULTS
from mlcpipe.models.gemma2 import embedding_scale
from mlcpipe.nn.base_config import read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.decoder import decoder
from mlcpipe.nn.gguf import PRE_NORM, GgufFamily

DEFAULTS = replace(GEMMA2_DEFAULTS, num_kv_heads=16, names={})


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a Gemma config.json. Raises ConfigError for unsupported fields."""
    base = read_base(config, DEFAULTS, mlp_bias=[None, False], hidden_activation=[None, DEFAULTS.act])
    if base.act == "gelu":  # transformers takes its approximation, too
        base = replace(base, act=DEFAULTS.act)
    bias = base.fields.flag("attention_bias", False)
    return decoder(base, base.attentions(qkv_bias=bias, o_bias=bias), embedding_scale=embedding_scale(base))


GGUF = GgufFamily("gemma", None, PRE_NORM, norm_offset=DEFAULTS.norm.offset)
