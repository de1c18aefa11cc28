"""Apertus (Swiss AI 2025): Llama with norms of heads and an MLP of two matrices with xIELU, a learned activation.

Models: Apertus 8B, 70B.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlcpipe.models.qwen2 import complete_gguf
from mlcpipe.nn.base_config import Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.config import rope_table
from mlcpipe.nn.decoder import decoder
from mlcpipe.nn.gguf import ATTENTION, PLAIN_MLP, GgufFamily
from mlcpipe.nn.names import CheckpointNames
from mlcpipe.nn.norm import NormSpec

DEFAULTS = Defaults(positions=65536, norm=NormSpec(eps=1e-5), theta=1.2e7, act="xielu")
DEFAULT_ROPE: Mapping[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 1.2e7,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
NAMES = CheckpointNames(
    layer={"input_layernorm": "attention_layernorm", "post_attention_layernorm": "feedforward_layernorm"}
)


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for an Apertus config.json. Raises ConfigError for unsupported fields."""
    base = read_base(
        config,
        DEFAULTS,
        mlp_bias=[None, False],
        qk_norm=[None, True],
        post_norm=[None, False],
        original_max_position_embeddings=[None],
    )
    bias = base.fields.flag("attention_bias", False)
    rope = base.read_rope(rope_table(base.fields) or DEFAULT_ROPE, base.theta)
    specs = base.attentions(qkv_bias=bias, o_bias=bias, norm="head")
    return decoder(base, specs, lambda i: base.plain_mlp(), ropes=[rope])


GGUF = GgufFamily(
    "apertus",
    complete_gguf,
    {**ATTENTION, **PLAIN_MLP, "ffn_norm": "post_attention_layernorm"},
    numbers={
        "xielu.alpha_n": "mlp.act_fn.alpha_n",
        "xielu.alpha_p": "mlp.act_fn.alpha_p",
        "xielu.beta": 0.5,
        "xielu.eps": -1e-6,
    },
)
