"""Falcon 1 and 2 (Almazrouei et al. 2023): attention and MLP side by side, one KV head or groups of queries.

Models: Falcon 7B, 40B, 180B, Falcon 2 11B.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mlcpipe.errors import ConfigError
from mlcpipe.nn.base_config import BaseConfig, Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.decoder import decoder
from mlcpipe.nn.decoder_layer import PARALLEL, PRE_NORM, LayerForm
from mlcpipe.nn.gguf import FUSED, PLAIN_MLP, GgufFamily, GgufFile
from mlcpipe.nn.names import CheckpointNames
from mlcpipe.nn.norm import NormSpec

DEFAULTS = Defaults(
    positions=2048,
    norm=NormSpec("layer", 1e-5, bias=True),
    tied=True,
    act="gelu",
    expansion=4,
    names={
        "rms_norm_eps": "layer_norm_epsilon",
        "num_key_value_heads": "num_kv_heads",
        "intermediate_size": "ffn_hidden_size",
        "hidden_act": "activation",
    },
)
NAMES = CheckpointNames(
    prefixes=("transformer.", ""),
    top={"embed_tokens": "word_embeddings", "layers": "h", "norm": "ln_f"},
    layer={
        "self_attn.qkv_proj": "self_attention.query_key_value",
        "self_attn.o_proj": "self_attention.dense",
        "mlp.up_proj": "mlp.dense_h_to_4h",
        "mlp.down_proj": "mlp.dense_4h_to_h",
    },
)
TWO_NORMS = LayerForm("ln_attn", before_mlp="ln_mlp", parallel=True)


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a Falcon config.json. Raises ConfigError for unsupported fields."""
    base = read_base(config, DEFAULTS, alibi=[None, False], attention_bias=[None, False], mlp_bias=[None, False])
    fields, form = base.fields, _form(base)
    fields.refuse(head_dim=[None, base.hidden_size // base.num_heads])
    if not fields.flag("new_decoder_architecture", False):
        base = replace(base, num_kv_heads=1 if fields.flag("multi_query", True) else base.num_heads)
    bias = fields.flag("bias", False)
    specs = base.attentions(qkv_bias=bias, o_bias=bias, fused="groups")
    return decoder(base, specs, lambda i: base.plain_mlp(bias=bias), form=form)


def _form(base: BaseConfig) -> LayerForm:
    """Where the norms of layers are. Raises ConfigError for forms that no model of the family has."""
    fields = base.fields
    new, parallel = fields.flag("new_decoder_architecture", False), fields.flag("parallel_attn", True)
    norms = fields.integer("num_ln_in_parallel_attn", 2 if new else 1, high=2)
    if (new and not parallel) or (norms == 2 and not new):
        raise ConfigError("field new_decoder_architecture", where=fields.where,
                          expected="true with parallel_attn, or false with one norm", found=new)  # fmt: skip
    return TWO_NORMS if norms == 2 else PARALLEL if parallel else PRE_NORM


def _complete_gguf(file: GgufFile, config: dict[str, Any]) -> None:
    """Files have the KV heads that count, and not what else models of the new architecture do."""
    config["new_decoder_architecture"], config["num_ln_in_parallel_attn"] = True, 2 if _SECOND in file else 1
    config["bias"] = "blk.0.attn_qkv.bias" in file


def _gguf_names(file: GgufFile) -> dict[str, str]:
    norms = {"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"} if _SECOND in file else {}
    return {**FUSED, **PLAIN_MLP, **norms}


_SECOND = "blk.0.attn_norm_2.weight"
GGUF = GgufFamily("falcon", _complete_gguf, names_of=_gguf_names, grouped=True)
