"""Qwen 3.5 mixtures of experts (Qwen team 2026): Qwen 3.5 with experts, one of which all tokens use, gated.

Models: the text of Qwen3.5-35B-A3B, 122B-A10B and 397B-A17B, Qwen3.6-35B-A3B.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mlcpipe.models.qwen3_5_text import DEFAULTS, DELTAS, FIXED, NAMES
from mlcpipe.models.qwen3_next import complete_sparse_gguf, sparse
from mlcpipe.nn.base_config import read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.gguf import EXPERTS, MOE, GgufFamily

__all__ = ["NAMES", "build"]


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a Qwen 3.5 MoE text config.json. Raises ConfigError for unsupported fields."""
    base = read_base(config, replace(DEFAULTS, num_kv_heads=2, intermediate_size=1), **FIXED)
    base.fields.refuse(mlp_only_layers=[None, []], decoder_sparse_step=[None, 1], norm_topk_prob=[None, True])
    return sparse(base, (256, 8), normalize=True)


GGUF = GgufFamily("qwen35moe", complete_sparse_gguf, {**DELTAS, **MOE}, EXPERTS, rope="partial", norm_offset=1.0)
