"""Llama 2, 3, 3.1+ (Touvron et al. 2023; Meta 2024) and other models with `model_type: llama`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlcpipe.nn.attention import Attention
from mlcpipe.nn.base_config import Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.config import layer_windows
from mlcpipe.nn.decoder_layer import PreNormLayer
from mlcpipe.nn.gguf import GgufFamily, GgufFile

DEFAULTS = Defaults(positions=2048)


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a Llama config.json. Raises ConfigError for unsupported fields."""
    base = read_base(config, DEFAULTS, sliding_window=[None])
    bias, mlp_bias = base.fields.flag("attention_bias", False), base.fields.flag("mlp_bias", False)
    windows = layer_windows(base.fields, None, [False] * base.num_layers, fixed=True)
    specs = base.attentions(windows, qkv_bias=bias, o_bias=bias)
    layers = [
        PreNormLayer(Attention(spec, i), base.mlp(bias=mlp_bias), base.hidden_size, base.eps)
        for i, spec in enumerate(specs)
    ]
    return CausalLM(base.facts([base.rope()]), layers)


def complete_gguf(file: GgufFile, config: dict[str, Any]) -> None:
    """The fields of config.json that GGUF's `llama` has."""
    config["attention_bias"] = "blk.0.attn_q.bias" in file
    config["mlp_bias"] = "blk.0.ffn_up.bias" in file
    if window := file.integer("attention.sliding_window", 0):
        config["sliding_window"] = window


GGUF = GgufFamily("llama", complete_gguf, interleaved=True)
