"""MiniMax M2 (MiniMax 2025): experts chosen by biased sigmoids, norms over all heads, a part of each head rotates.

Models: MiniMax-M2, M2.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlcpipe.models.mixtral import NAMES as MIXTRAL
from mlcpipe.nn.base_config import Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.decoder import decoder
from mlcpipe.nn.gguf import EXPERTS, MOE, PRE_NORM, GgufFamily, GgufFile, read_experts
from mlcpipe.nn.moe import Routing, SparseMoE, expert_counts
from mlcpipe.nn.names import CheckpointNames

DEFAULTS = Defaults(positions=196608, num_kv_heads=8, head_dim=128, theta=5e6)
BIAS = "e_score_correction_bias"
NAMES = CheckpointNames(layer={**MIXTRAL.layer, f"mlp.gate.{BIAS}": f"block_sparse_moe.{BIAS}"})
# What published files say and no model of the family does otherwise.
FIXED: Mapping[str, list[Any]] = {
    "attention_bias": [None, False],
    "mlp_bias": [None, False],
    "qk_norm_type": [None, "per_layer"],
    "scoring_func": [None, "sigmoid"],
    "shared_intermediate_size": [None, 0],
    "sliding_window": [None],
    "use_qk_norm": [None, True],
    "use_routing_bias": [None, True],
}


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a MiniMax M2 config.json. Raises ConfigError for unsupported fields."""
    base = read_base(config, DEFAULTS, **FIXED)
    routing = Routing(*expert_counts(base.fields, 256, 8), "sigmoid", normalize=True, bias=True)
    rotated = base.fields.integer("rotary_dim", base.head_dim, high=base.head_dim)
    return decoder(
        base,
        base.attentions(norm="all"),
        lambda i: SparseMoE(base.hidden_size, base.intermediate_size, routing, base.act),
        ropes=[base.rope(partial=rotated / base.head_dim)],
    )


def _complete_gguf(file: GgufFile, config: dict[str, Any]) -> None:
    read_experts(file, config, "sigmoid")
    config["intermediate_size"] = config["moe_intermediate_size"]


GGUF = GgufFamily("minimax-m2", _complete_gguf, {**PRE_NORM, **MOE}, EXPERTS, rope="partial")
