"""Llama 2, 3, 3.1+ (Touvron et al. 2023; Meta 2024) and other models with `model_type: llama`.

Models: Llama 2, 3, 3.1, 3.2, 3.3; TinyLlama, SmolLM2, Yi, DeepSeek-R1-Distill-Llama and others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlcpipe.nn.base_config import Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.decoder import decoder
from mlcpipe.nn.gguf import GgufFamily, GgufFile

DEFAULTS = Defaults(positions=2048)


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a Llama config.json. Raises ConfigError for unsupported fields."""
    base = read_base(config, DEFAULTS, sliding_window=[None])
    bias, mlp_bias = base.fields.flag("attention_bias", False), base.fields.flag("mlp_bias", False)
    return decoder(base, base.attentions(qkv_bias=bias, o_bias=bias), lambda i: base.mlp(bias=mlp_bias))


def complete_gguf(file: GgufFile, config: dict[str, Any]) -> None:
    """The fields of config.json that GGUF's `llama` has."""
    config["attention_bias"] = "blk.0.attn_q.bias" in file
    config["mlp_bias"] = "blk.0.ffn_up.bias" in file
    if window := file.integer("attention.sliding_window", 0):
        config["sliding_window"] = window


GGUF = GgufFamily("llama", complete_gguf, interleaved=True)
