"""StarCoder and SantaCoder (Li et al. 2023): GPT-2 whose queries share one head of keys and values.

Models: StarCoder 15B, StarCoderBase 1B to 7B, SantaCoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mlcpipe.models.gpt2 import DEFAULTS as GPT2
from mlcpipe.models.gpt2 import FIXED, GGUF_NAMES, LAYER_NAMES, TOP_NAMES, learned
from mlcpipe.nn.base_config import read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.gguf import GgufFamily
from mlcpipe.nn.names import CheckpointNames

DEFAULTS = replace(GPT2, act="gelu_pytorch_tanh")
NAMES = CheckpointNames(("transformer.", ""), top=TOP_NAMES, layer=LAYER_NAMES)


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a GPT-BigCode config.json. Raises ConfigError for unsupported fields."""
    base = read_base(config, DEFAULTS, **FIXED)
    shared = base.fields.flag("multi_query", True)
    scale = None if base.fields.flag("scale_attn_weights", True) else 1.0
    base = replace(base, num_kv_heads=1 if shared else base.num_heads)
    fused = "parts" if shared else "groups"
    return learned(base, base.attentions(qkv_bias=True, o_bias=True, fused=fused, scale=scale))


GGUF = GgufFamily("starcoder", names=GGUF_NAMES)
