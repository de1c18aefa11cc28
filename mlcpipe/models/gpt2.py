"""GPT-2 (Radford et al. 2019): learned positions, layer norms, one matrix for q, k and v.

Models: GPT-2 124M to 1.5B, DistilGPT2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mlcpipe.nn.attention_spec import AttentionSpec
from mlcpipe.nn.base_config import BaseConfig, Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.decoder import decoder
from mlcpipe.nn.gguf import FUSED, PLAIN_MLP, GgufFamily
from mlcpipe.nn.names import CheckpointNames
from mlcpipe.nn.norm import NormSpec

DEFAULTS = Defaults(
    positions=1024,
    fixed_heads=True,
    norm=NormSpec("layer", 1e-5, bias=True),
    tied=True,
    act="gelu_new",
    expansion=4,
    names={
        "hidden_size": "n_embd",
        "intermediate_size": "n_inner",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
        "rms_norm_eps": "layer_norm_epsilon",
        "hidden_act": "activation_function",
    },
)
_LINEAR = {
    "self_attn.qkv_proj": "attn.c_attn",
    "self_attn.o_proj": "attn.c_proj",
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
}
LAYER_NAMES = {"input_layernorm": "ln_1", "post_attention_layernorm": "ln_2", **_LINEAR}
TOP_NAMES = {"embed_tokens": "wte", "embed_positions": "wpe", "layers": "h", "norm": "ln_f"}
NAMES = CheckpointNames(("transformer.", ""), top=TOP_NAMES, layer=LAYER_NAMES, turned=tuple(_LINEAR.values()))
FIXED: Mapping[str, list[Any]] = {
    "add_cross_attention": [None, False],
    "attention_bias": [None, False],
    "mlp_bias": [None, False],
}


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a GPT-2 config.json. Raises ConfigError for unsupported fields."""
    base = read_base(config, DEFAULTS, **FIXED)
    scale = base.head_dim**-0.5 if base.fields.flag("scale_attn_weights", True) else 1.0
    inverse = base.fields.flag("scale_attn_by_inverse_layer_idx", False)
    scales = [scale / (i + 1) if inverse else scale for i in range(base.num_layers)]
    specs = base.attentions(qkv_bias=True, o_bias=True, fused="parts")
    return learned(base, [replace(spec, scale=one) for spec, one in zip(specs, scales)])


def learned(base: BaseConfig, specs: Sequence[AttentionSpec], bias: bool = True, first: int = 0) -> CausalLM:
    """A model with vectors of positions, from row `first` on, and without rotary ones."""
    none = [False] * base.num_layers
    return decoder(base, specs, lambda i: base.plain_mlp(bias), rotated=none, positions=(first, base.positions))


GGUF_NAMES = {"position_embd": "embed_positions", **FUSED, **PLAIN_MLP, "ffn_norm": "post_attention_layernorm"}
GGUF = GgufFamily("gpt2", names=GGUF_NAMES)
