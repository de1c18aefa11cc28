"""LFM2 mixtures of experts (Liquid AI 2025): LFM2 with experts chosen by biased sigmoids after the first layers.

Models: LFM2-8B-A1B, LFM2-24B-A2B.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tvm.relax.frontend import nn

from mlcpipe.models.lfm2 import DEFAULTS as LFM2_DEFAULTS
from mlcpipe.models.lfm2 import FIXED, convolving
from mlcpipe.models.lfm2 import GGUF as LFM2
from mlcpipe.models.lfm2 import NAMES as LFM2_NAMES
from mlcpipe.models.lfm2 import complete_gguf as complete_lfm2
from mlcpipe.models.mixtral import PARTS
from mlcpipe.nn.base_config import read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.gguf import EXPERTS, MOE, GgufFamily, GgufFile, read_experts
from mlcpipe.nn.moe import Routing, SparseMoE, expert_counts
from mlcpipe.nn.names import CheckpointNames

DEFAULTS = replace(LFM2_DEFAULTS, intermediate_size=7168)
NAMES = CheckpointNames(
    top=LFM2_NAMES.top,
    layer={
        **LFM2_NAMES.layer,
        "mlp.gate": "feed_forward.gate",
        "mlp.gate.e_score_correction_bias": "feed_forward.expert_bias",
        **{f"mlp.experts.{{}}.{x}_proj": f"feed_forward.experts.{{}}.{w}" for x, w in PARTS.items()},
    },
)


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for an LFM2 MoE config.json. Raises ConfigError for unsupported fields."""
    base = read_base(config, DEFAULTS, **FIXED)
    fields = base.fields
    routing = Routing(
        *expert_counts(fields, 32, 4), "sigmoid", normalize=fields.flag("norm_topk_prob", True), epsilon=1e-6,
        scale=fields.number("routed_scaling_factor", 1.0), bias=fields.flag("use_expert_bias", True),
    )  # fmt: skip
    width, dense = fields.integer("moe_intermediate_size", 1792), fields.integer("num_dense_layers", 2, low=0)

    def mlp(i: int) -> nn.Module:
        return base.mlp() if i < dense else SparseMoE(base.hidden_size, width, routing, base.act)

    return convolving(base, mlp)


def _complete_gguf(file: GgufFile, config: dict[str, Any]) -> None:
    complete_lfm2(file, config)
    read_experts(file, config, "sigmoid")
    config["num_dense_layers"] = dense = file.integer("leading_dense_block_count", 0)
    config["use_expert_bias"] = f"blk.{dense}.exp_probs_b.bias" in file


GGUF = GgufFamily("lfm2moe", _complete_gguf, {**LFM2.names, **MOE}, EXPERTS, some_attend=True)
