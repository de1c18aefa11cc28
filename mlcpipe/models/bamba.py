"""Bamba (IBM, Princeton, CMU, UIUC 2024): Mamba-2 in most layers, attention with RoPE over half of each head in others.

Models: Bamba 9B v1, v2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlcpipe.errors import ConfigError
from mlcpipe.nn.base_config import BaseConfig, Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.decoder import Mixer, decoder
from mlcpipe.nn.gguf import PRE_NORM, SCAN, GgufFamily, GgufFile
from mlcpipe.nn.mamba2 import Mamba2, read_gguf, read_mamba2
from mlcpipe.nn.names import CheckpointNames
from mlcpipe.nn.norm import NormSpec

DEFAULTS = Defaults(positions=262_144, num_kv_heads=8, norm=NormSpec(eps=1e-5), intermediate_size=14336)
NAMES = CheckpointNames(
    top={"norm": "final_layernorm"},
    layer={"mlp": "feed_forward", "post_attention_layernorm": "pre_ff_layernorm"},
)


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a Bamba config.json. Raises ConfigError for unsupported fields."""
    base = read_base(config, DEFAULTS, hidden_act=[None, "silu"], layer_types=[None], partial_rotary_factor=[None, 0.5])
    fields, attends = base.fields, _attending(base)
    bias, mlp_bias = fields.flag("attention_bias", False), fields.flag("mlp_bias", False)
    attention = base.attention(qkv_bias=bias, o_bias=bias)
    inner = fields.integer("mamba_expand", 2, high=64) * base.hidden_size
    scan = read_mamba2(fields, base.hidden_size, inner, eps=base.norm.eps)
    mixers = [attention if i in attends else Mixer("mamba", Mamba2(scan, i)) for i in range(base.num_layers)]
    return decoder(base, mixers, lambda i: base.mlp(bias=mlp_bias), ropes=[base.rope(partial=0.5)])


def _attending(base: BaseConfig) -> set[int]:
    """The layers that attend."""
    listed = base.fields.get("attn_layer_indices", [])
    if not isinstance(listed, list) or any(type(i) is not int for i in listed):
        raise ConfigError("field attn_layer_indices", where=base.fields.where, expected="numbers of layers")
    return set(listed)


def _complete_gguf(file: GgufFile, config: dict[str, Any]) -> None:
    counts = file.numbers("attention.head_count_kv", config["num_hidden_layers"])
    attends = config["attn_layer_indices"] = [i for i, count in enumerate(counts) if count]
    config["mamba_expand"], rest = divmod(read_gguf(file, config), config["hidden_size"])
    if rest:
        raise file.error("ssm.inner_size", f"a multiple of {config['hidden_size']}")
    if int(config["head_dim"] * config.pop("partial_rotary_factor")) != config["head_dim"] // 2:
        raise file.error("rope.dimension_count", f"{config['head_dim'] // 2}, half a head")
    config["attention_bias"] = any(f"blk.{i}.attn_q.bias" in file for i in attends)
    config["mlp_bias"] = "blk.0.ffn_up.bias" in file


GGUF = GgufFamily(
    "granitehybrid", _complete_gguf, {**PRE_NORM, **SCAN}, rope="partial", interleaved=True, some_attend=True,
    applies=lambda file: bool(file.get("rope.scaling.finetuned", False)),  # as llama.cpp tells Granite 4 from it
)  # fmt: skip
