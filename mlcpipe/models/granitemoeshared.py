"""Granite mixtures of experts (IBM 2025) with an expert that all tokens use.

Models: MoE Power 7B-A1B.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mlcpipe.models.granite import DEFAULTS
from mlcpipe.models.granitemoe import GGUF as GRANITEMOE
from mlcpipe.models.granitemoe import NAMES, mixture
from mlcpipe.models.granitemoe import complete_gguf as complete_granitemoe
from mlcpipe.nn.base_config import read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.gguf import GgufFile

__all__ = ["GGUF", "NAMES", "build"]


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a Granite MoE Shared config.json. Raises ConfigError for unsupported fields."""
    base = read_base(config, DEFAULTS, sliding_window=[None], mlp_bias=[None, False])
    return mixture(base, base.fields.integer("shared_intermediate_size", 0, low=0))


def _complete_gguf(file: GgufFile, config: dict[str, Any]) -> None:
    complete_granitemoe(file, config)
    config["shared_intermediate_size"] = file.integer("expert_shared_feed_forward_length")


GGUF = replace(GRANITEMOE, complete=_complete_gguf, applies=lambda file: "blk.0.ffn_gate_shexp.weight" in file)
