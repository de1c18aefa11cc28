"""Seed-OSS (ByteDance 2025): Llama with biases of q, k and v.

Models: Seed-OSS 36B.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlcpipe.models.llama import complete_gguf
from mlcpipe.nn.base_config import Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.decoder import decoder
from mlcpipe.nn.gguf import ATTENTION, MLP, GgufFamily, GgufFile

DEFAULTS = Defaults(positions=524288, num_kv_heads=8, head_dim=128)


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a Seed-OSS config.json. Raises ConfigError for unsupported fields."""
    base = read_base(config, DEFAULTS)
    bias, o_bias, mlp_bias = (
        base.fields.flag(name, default)
        for name, default in (("attention_bias", True), ("attention_out_bias", False), ("mlp_bias", False))
    )
    return decoder(base, base.attentions(qkv_bias=bias, o_bias=o_bias), lambda i: base.mlp(bias=mlp_bias))


def _complete_gguf(file: GgufFile, config: dict[str, Any]) -> None:
    complete_gguf(file, config)
    config["attention_out_bias"] = "blk.0.attn_output.bias" in file


GGUF = GgufFamily("seed_oss", _complete_gguf, {**ATTENTION, **MLP, "post_attention_norm": "post_attention_layernorm"})
