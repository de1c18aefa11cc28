"""MPT (MosaicML 2023): ALiBi instead of positions, layer norms and matrices without biases, clipped q, k and v.

Models: MPT 7B and 30B, Replit Code 3B.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mlcpipe.nn.alibi import slopes_of
from mlcpipe.nn.base_config import Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.config import Fields
from mlcpipe.nn.decoder import decoder
from mlcpipe.nn.gguf import FUSED, PLAIN_MLP, GgufFamily, GgufFile
from mlcpipe.nn.names import CheckpointNames
from mlcpipe.nn.norm import NormSpec

DEFAULTS = Defaults(
    positions=2048,
    fixed_heads=True,
    norm=NormSpec("layer", 1e-5),
    tied=True,
    act="gelu",
    expansion=4,
    names={
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "max_position_embeddings": "max_seq_len",
        "rms_norm_eps": "layer_norm_epsilon",
    },
)
NAMES = CheckpointNames(
    prefixes=("transformer.", ""),
    top={"embed_tokens": "wte", "layers": "blocks", "norm": "norm_f"},
    layer={
        "input_layernorm": "norm_1",
        "post_attention_layernorm": "norm_2",
        "self_attn.qkv_proj": "attn.Wqkv",
        "self_attn.o_proj": "attn.out_proj",
        **{f"mlp.{x}_proj": f"ffn.{x}_proj" for x in ("up", "down")},
    },
)
FIXED: Mapping[str, list[Any]] = {
    "expansion_ratio": [None, 4],
    "hidden_act": [None, "gelu"],
    "no_bias": [None, True],
    "norm_type": [None, "low_precision_layernorm", "layernorm"],
    "embedding_fraction": [None, 1, 1.0],
    **dict.fromkeys(("attention_bias", "mlp_bias"), [None, False]),
}


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for an MPT config.json. Raises ConfigError for unsupported fields."""
    base = read_base(config, DEFAULTS, **FIXED)
    base = replace(base, intermediate_size=4 * base.hidden_size)
    fields = Fields(base.fields.table("attn_config"), "config.json attn_config")
    fields.refuse(
        alibi=[None, True], alibi_bias_max=[None, 8, 8.0], attn_type=[None, "multihead_attention"],
        **dict.fromkeys(("qk_ln", "prefix_lm", "attn_uses_sequence_id"), [None, False]),
    )  # fmt: skip
    scale, clip = (fields.optional_number(name, None, low=1e-6) for name in ("softmax_scale", "clip_qkv"))
    slopes = slopes_of(base.num_heads)
    specs = base.attentions(fused="parts", slopes=slopes, scale=scale, clip=clip or 0.0)
    return decoder(base, specs, lambda i: base.plain_mlp(), rotated=[False] * base.num_layers)


def _complete_gguf(file: GgufFile, config: dict[str, Any]) -> None:
    bias, clip = file.number("attention.max_alibi_bias", 0.0), file.number("attention.clamp_kqv", 0.0)
    config["attn_config"] = {"alibi": bias > 0, "alibi_bias_max": bias, "clip_qkv": clip or None}


GGUF = GgufFamily("mpt", _complete_gguf, {**FUSED, **PLAIN_MLP, "ffn_norm": "post_attention_layernorm"})
