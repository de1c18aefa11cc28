"""Granite 3 mixtures of experts (IBM 2024): Granite with experts in every layer.

Models: Granite 3.0 and 3.1 1B-A400M, 3B-A800M.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlcpipe.models.granite import DEFAULTS, multiplied
from mlcpipe.models.granite import complete_gguf as complete_granite
from mlcpipe.models.mixtral import NAMES as MIXTRAL
from mlcpipe.nn.base_config import BaseConfig, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.gguf import EXPERTS, MOE, PRE_NORM, GgufFamily, GgufFile, read_experts
from mlcpipe.nn.moe import Routing, SparseMoE, expert_counts
from mlcpipe.nn.names import CheckpointNames

NAMES = CheckpointNames(
    layer={**MIXTRAL.layer, "mlp.gate": "block_sparse_moe.router.layer", "mlp.shared_expert": "shared_mlp"}
)


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a Granite MoE config.json. Raises ConfigError for unsupported fields."""
    return mixture(read_base(config, DEFAULTS, sliding_window=[None], mlp_bias=[None, False]), 0)


def mixture(base: BaseConfig, shared_width: int) -> CausalLM:
    """The model, with an expert of that width that all tokens use; 0 is none."""
    routing = Routing(*expert_counts(base.fields, experts=8, chosen=2), normalize=True)
    sizes = base.hidden_size, base.intermediate_size
    return multiplied(base, lambda i: SparseMoE(*sizes, routing, base.act, shared_width=shared_width))


def complete_gguf(file: GgufFile, config: dict[str, Any]) -> None:
    """The fields of config.json that GGUF's `granitemoe` has."""
    complete_granite(file, config)
    read_experts(file, config)


GGUF = GgufFamily("granitemoe", complete_gguf, {**PRE_NORM, **MOE}, EXPERTS, interleaved=True)
