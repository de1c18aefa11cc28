"""Phi 1, 1.5 and 2 (Gunasekar et al. 2023): attention and MLP read one layer norm, RoPE turns half of each head.

Models: Phi-1, Phi-1.5, Phi-2 2.7B.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlcpipe.nn.base_config import Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.decoder import decoder
from mlcpipe.nn.decoder_layer import PARALLEL
from mlcpipe.nn.gguf import ATTENTION, PLAIN_MLP, GgufFamily
from mlcpipe.nn.names import CheckpointNames
from mlcpipe.nn.norm import NormSpec

DEFAULTS = Defaults(
    positions=2048, norm=NormSpec("layer", 1e-5, bias=True), act="gelu_new", names={"rms_norm_eps": "layer_norm_eps"}
)
NAMES = CheckpointNames(
    top={"norm": "final_layernorm"},
    layer={
        "self_attn.q_norm": "self_attn.q_layernorm",
        "self_attn.k_norm": "self_attn.k_layernorm",
        "self_attn.o_proj": "self_attn.dense",
        "mlp.up_proj": "mlp.fc1",
        "mlp.down_proj": "mlp.fc2",
    },
)


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a Phi config.json. Raises ConfigError for unsupported fields."""
    base = read_base(config, DEFAULTS, attention_bias=[None], mlp_bias=[None, False])
    norm = "head" if base.fields.flag("qk_layernorm", False) else ""
    specs = base.attentions(qkv_bias=True, o_bias=True, norm=norm)
    rope = base.rope(partial=0.5)
    return decoder(base, specs, lambda i: base.plain_mlp(bias=True), form=PARALLEL, ropes=[rope], head_bias=True)


# Files of the first converters have q, k and v as one tensor.
GGUF = GgufFamily("phi2", names={**ATTENTION, **PLAIN_MLP}, rope="partial")
