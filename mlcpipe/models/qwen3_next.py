"""Qwen 3 Next (Qwen team 2025): gated delta nets and gated attention, with experts, one of which all tokens use.

Models: Qwen3-Next-80B-A3B, Qwen3-Coder-Next.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tvm.relax.frontend import nn

from mlcpipe.models.qwen3_5_text import DEFAULTS as QWEN3_5
from mlcpipe.models.qwen3_5_text import FIXED, NAMES, hybrid
from mlcpipe.models.qwen3_moe import dense_layers
from mlcpipe.nn.base_config import BaseConfig, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.moe import Routing, SparseMoE, expert_counts

__all__ = ["NAMES", "build"]

DEFAULTS = replace(QWEN3_5, num_kv_heads=2, intermediate_size=5632)


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a Qwen 3 Next config.json. Raises ConfigError for unsupported fields."""
    base = read_base(config, DEFAULTS, **FIXED)
    normalize = base.fields.flag("norm_topk_prob", True)
    return sparse(
        base, (512, 10), normalize, qkvz=("in_proj_qkvz",), ba=("in_proj_ba",), grouped=("in_proj_qkvz", "in_proj_ba")
    )


def sparse(base: BaseConfig, counts: tuple[int, int], normalize: bool, **options: Any) -> CausalLM:
    """Qwen 3.5 with experts in all layers that `dense_layers` leaves; `counts`: the defaults of both numbers."""
    fields = base.fields
    experts, chosen = expert_counts(fields, *counts, low=0)
    sizes = [fields.integer(f"{name}_intermediate_size", 512) for name in ("moe", "shared_expert")]
    routing, dense = Routing(experts, chosen, normalize=normalize), dense_layers(base, experts)

    def mlp(i: int) -> nn.Module:
        if i in dense:
            return base.mlp()
        return SparseMoE(base.hidden_size, sizes[0], routing, base.act, shared_width=sizes[1], shared_gate=True)

    return hybrid(base, mlp, **options)
