"""Llama 2, 3, 3.1+ (Touvron et al. 2023; Meta 2024) and everything that says `model_type: llama`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlcpipe.nn.attention import Attention, AttentionSpec
from mlcpipe.nn.causal_lm import CausalLM, ModelFacts
from mlcpipe.nn.config import Fields, check_architecture, rope_table
from mlcpipe.nn.decoder_layer import PreNormLayer
from mlcpipe.nn.mlp import GatedMLP
from mlcpipe.nn.rope import read_rope


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a Llama config.json. Raises ConfigError for what it cannot honour."""
    fields = Fields(config)
    check_architecture(fields)
    fields.refuse(sliding_window=[None], partial_rotary_factor=[None, 1, 1.0])
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    eps = fields.number("rms_norm_eps", 1e-6, low=0.0, high=1.0)
    bias = fields.flag("attention_bias", False)
    spec = AttentionSpec(
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=fields.integer("num_key_value_heads", heads),
        head_dim=fields.integer("head_dim", hidden // heads, high=1024),
        qkv_bias=bias,
        o_bias=bias,
    )
    layers = fields.integer("num_hidden_layers", high=1024)
    rope = read_rope(fields, rope_table(fields), spec.head_dim, fields.number("rope_theta", 1e4, low=1.0))
    facts = ModelFacts(
        model_type="llama",
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        context_length=fields.integer("max_position_embeddings", 2048),
        windows=(None,) * layers,
        ropes=(rope,),
        rope_of=(0,) * layers,
        norm_eps=eps,
        tied=fields.flag("tie_word_embeddings", False),
    )
    intermediate = fields.integer("intermediate_size")
    act, mlp_bias = fields.get("hidden_act", "silu"), fields.flag("mlp_bias", False)
    return CausalLM(
        facts,
        [
            PreNormLayer(Attention(spec, i), GatedMLP(hidden, intermediate, act, mlp_bias), hidden, eps)
            for i in range(layers)
        ],
    )
