"""Qwen 3 Next (Qwen team 2025): gated delta nets and gated attention, with experts, one of which all tokens use.

Models: Qwen3-Next-80B-A3B, Qwen3-Coder-Next.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tvm.relax.frontend import nn

from mlcpipe.models.qwen3_5_text import DEFAULTS as QWEN3_5
from mlcpipe.models.qwen3_5_text import DELTAS, FIXED, NAMES, TILED, complete_gguf, hybrid
from mlcpipe.models.qwen3_moe import dense_layers
from mlcpipe.nn.base_config import BaseConfig, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.gguf import EXPERTS, MOE, GgufFamily, GgufFile, read_experts
from mlcpipe.nn.moe import Routing, SparseMoE, expert_counts

__all__ = ["NAMES", "build"]

DEFAULTS = replace(QWEN3_5, num_kv_heads=2, intermediate_size=5632)
APART = "linear_qkvz_apart"  # of GGUF files: the rows of q, k and v of all key heads, and those of z


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a Qwen 3 Next config.json. Raises ConfigError for unsupported fields."""
    base = read_base(config, DEFAULTS, **FIXED)
    normalize = base.fields.flag("norm_topk_prob", True)
    qkvz = ("in_proj_qkv", "in_proj_z") if base.fields.flag(APART, False) else ("in_proj_qkvz",)
    return sparse(base, (512, 10), normalize, qkvz=qkvz, ba=("in_proj_ba",), grouped=("in_proj_qkvz", "in_proj_ba"))


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


def complete_sparse_gguf(file: GgufFile, config: dict[str, Any]) -> None:
    """The fields of config.json that GGUF has of mixtures like Qwen 3.5's."""
    complete_gguf(file, config)
    read_experts(file, config)
    del config["intermediate_size"]  # of dense MLPs
    config["shared_expert_intermediate_size"] = file.integer("expert_shared_feed_forward_length")


def _complete_gguf(file: GgufFile, config: dict[str, Any]) -> None:
    """Older files have the rows of q, k, v and z by key head; llama.cpp leaves value heads in their order."""
    complete_sparse_gguf(file, config)
    layers = range(min(config["num_hidden_layers"], 1024))
    config[APART], config[TILED] = any(f"blk.{i}.attn_qkv.weight" in file for i in layers), False


GGUF = GgufFamily(
    "qwen3next",
    _complete_gguf,
    {**DELTAS, **MOE, "ssm_in": "linear_attn.in_proj_qkvz", "ssm_ba": "linear_attn.in_proj_ba"},
    EXPERTS,
    rope="partial",
    norm_offset=1.0,
)
