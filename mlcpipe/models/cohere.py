"""Command R, Aya 23 (Cohere 2024): attention beside the MLP, rope over pairs; Command R+ has norms of each head.

Models: Command R 35B, Command R+ 104B, Aya 23 8B, 35B.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mlcpipe.models.cohere2 import DEFAULT_LOGIT_SCALE, FIXED, complete_gguf
from mlcpipe.models.cohere2 import DEFAULTS as COHERE2_DEFAULTS
from mlcpipe.nn.base_config import read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.decoder import decoder
from mlcpipe.nn.decoder_layer import PARALLEL
from mlcpipe.nn.gguf import PRE_NORM, GgufFamily, GgufFile

DEFAULTS = replace(COHERE2_DEFAULTS, theta=5e5)


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a Cohere config.json. Raises ConfigError for unsupported fields."""
    base = read_base(config, DEFAULTS, **FIXED)
    fields, bias = base.fields, base.fields.flag("attention_bias", False)
    norm = "each" if fields.flag("use_qk_norm", False) else ""
    specs = base.attentions(qkv_bias=bias, o_bias=bias, interleaved=base.head_dim, norm=norm)
    return decoder(base, specs, form=PARALLEL, logit_scale=fields.number("logit_scale", DEFAULT_LOGIT_SCALE))


def _complete_gguf(file: GgufFile, config: dict[str, Any]) -> None:
    complete_gguf(file, config)
    config["use_qk_norm"] = "blk.0.attn_q_norm.weight" in file


GGUF = GgufFamily("command-r", _complete_gguf, PRE_NORM)
