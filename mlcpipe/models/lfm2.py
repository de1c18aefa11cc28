"""LFM2 (Liquid AI 2025): short convolutions, and attention with normalized heads in some layers.

Models: LFM2 and LFM2.5 350M, 700M, 1.2B, 2.6B.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from tvm.relax.frontend import nn

from mlcpipe.errors import ConfigError
from mlcpipe.nn.attention_spec import AttentionSpec
from mlcpipe.nn.base_config import BaseConfig, Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.config import layer_kinds
from mlcpipe.nn.decoder import Mixer, decoder
from mlcpipe.nn.gguf import PRE_NORM, GgufFamily, GgufFile
from mlcpipe.nn.names import CheckpointNames
from mlcpipe.nn.norm import NormSpec
from mlcpipe.nn.short_conv import ShortConv

DEFAULTS = Defaults(
    positions=128_000,
    num_kv_heads=8,
    norm=NormSpec(eps=1e-5),
    theta=1e6,
    tied=True,
    intermediate_size=12288,
    names={"rms_norm_eps": "norm_eps"},
)
NAMES = CheckpointNames(
    top={"norm": "embedding_norm"},
    layer={
        "input_layernorm": "operator_norm",
        "self_attn.q_norm": "self_attn.q_layernorm",
        "self_attn.k_norm": "self_attn.k_layernorm",
        "self_attn.o_proj": "self_attn.out_proj",
        "post_attention_layernorm": "ffn_norm",
        **{f"mlp.{x}_proj": f"feed_forward.{w}" for x, w in (("gate", "w1"), ("up", "w3"), ("down", "w2"))},
    },
)
ATTENDS, CONVOLVES = "full_attention", "conv"
# What published files say and no model of the family does otherwise.
FIXED: Mapping[str, list[Any]] = {
    "attention_bias": [None, False],
    "mlp_bias": [None, False],
    "hidden_act": [None, "silu"],
    "use_pos_enc": [None, True],
    "block_use_swiglu": [None, True],
}


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for an LFM2 config.json. Raises ConfigError for unsupported fields."""
    base = read_base(config, DEFAULTS, **FIXED)
    base.fields.refuse(**dict.fromkeys(("block_dim", "conv_dim", "conv_dim_out"), [None, base.hidden_size]))
    base = replace(base, intermediate_size=_mlp_width(base))
    return convolving(base, lambda i: base.mlp())


def convolving(base: BaseConfig, mlp: Callable[[int], nn.Module]) -> CausalLM:
    """The model with these MLPs, of layers that convolve or attend."""
    fields, hidden = base.fields, base.hidden_size
    base = replace(base, tied=fields.flag("tie_embedding", base.tied))
    bias, taps = fields.flag("conv_bias", False), fields.integer("conv_L_cache", 3, low=2, high=64)
    spec = base.attention(norm="head")

    def mixer(i: int, kind: str) -> AttentionSpec | Mixer:
        return spec if kind == ATTENDS else Mixer("conv", ShortConv(hidden, taps, i, bias))

    return decoder(base, [mixer(i, kind) for i, kind in enumerate(_layer_types(base))], mlp)


def _mlp_width(base: BaseConfig) -> int:
    """The rows of w1 and w3, of which config.json says only how they follow from another number."""
    fields = base.fields
    width = fields.integer("block_ff_dim", base.intermediate_size)
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return width
    width = 2 * width // 3
    multiplier = fields.optional_number("block_ffn_dim_multiplier", 1.0, low=1e-3, high=100.0)
    if multiplier is None:
        return width
    multiple = fields.integer("block_multiple_of", 256)
    return -(-int(multiplier * width) // multiple) * multiple


def _layer_types(base: BaseConfig) -> list[str]:
    """What each layer is, by `layer_types`, else by `full_attn_idxs`; without both all attend."""
    fields, count = base.fields, base.num_layers
    attending = fields.get("full_attn_idxs", list(range(count)))
    if types := layer_kinds(fields, count, {kind: kind for kind in (ATTENDS, CONVOLVES)}):
        return types
    if not isinstance(attending, list) or any(type(i) is not int for i in attending):
        raise ConfigError("field full_attn_idxs", where=fields.where, expected="numbers of layers")
    return [ATTENDS if i in attending else CONVOLVES for i in range(count)]


def complete_gguf(file: GgufFile, config: dict[str, Any]) -> None:
    """The fields of config.json that GGUF has of families like LFM2.

    Layers that convolve have no KV heads; the MLP's width is that of its matrices.
    """
    heads = file.numbers("attention.head_count_kv", config["num_hidden_layers"])
    config["layer_types"] = [ATTENDS if count else CONVOLVES for count in heads]
    config["conv_L_cache"] = file.integer("shortconv.l_cache")
    config["block_auto_adjust_ff_dim"] = False


GGUF = GgufFamily(
    "lfm2",
    complete_gguf,
    {
        **PRE_NORM,
        "token_embd_norm": "norm",
        **{f"shortconv.{name}": f"conv.{name}" for name in ("conv", "in_proj", "out_proj")},
    },
    some_attend=True,
)
