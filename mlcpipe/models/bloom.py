"""BLOOM (BigScience 2022): ALiBi instead of positions, a norm after the embedding, q, k and v by heads.

Models: BLOOM and BLOOMZ 560M, 1.1B, 1.7B, 3B, 7.1B, 176B.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mlcpipe.nn.alibi import slopes_of
from mlcpipe.nn.base_config import Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.decoder import decoder
from mlcpipe.nn.gguf import FUSED, PLAIN_MLP, GgufFamily
from mlcpipe.nn.names import CheckpointNames
from mlcpipe.nn.norm import NormSpec

DEFAULTS = Defaults(
    positions=2048,
    fixed_heads=True,
    norm=NormSpec("layer", 1e-5, bias=True),
    tied=True,
    act="gelu_new",
    expansion=4,
    names={
        "hidden_size": "n_embed",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "seq_length",
        "rms_norm_eps": "layer_norm_epsilon",
    },
)
NAMES = CheckpointNames(
    prefixes=("transformer.", ""),
    top={
        "embed_tokens": "word_embeddings",
        "embedding_norm": "word_embeddings_layernorm",
        "layers": "h",
        "norm": "ln_f",
    },
    layer={
        "self_attn.qkv_proj": "self_attention.query_key_value",
        "self_attn.o_proj": "self_attention.dense",
        "mlp.up_proj": "mlp.dense_h_to_4h",
        "mlp.down_proj": "mlp.dense_4h_to_h",
    },
)
FIXED: Mapping[str, list[Any]] = {
    "apply_residual_connection_post_layernorm": [None, False],
    "hidden_act": [None, "gelu_new"],
    **dict.fromkeys(("attention_bias", "mlp_bias"), [None, False]),
}


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a BLOOM config.json. Raises ConfigError for unsupported fields."""
    base = read_base(config, DEFAULTS, **FIXED)
    base = replace(base, intermediate_size=4 * base.hidden_size)
    slopes = slopes_of(base.num_heads)
    specs = base.attentions(qkv_bias=True, o_bias=True, fused="groups", slopes=slopes)
    none = [False] * base.num_layers
    return decoder(base, specs, lambda i: base.plain_mlp(bias=True), rotated=none, embedding_norm=base.norm)


GGUF = GgufFamily(
    "bloom",
    names={
        "token_embd_norm": "embedding_norm",
        **FUSED,
        **PLAIN_MLP,
        "ffn_norm": "post_attention_layernorm",
    },
    grouped=True,
)
