"""Mistral 4 (Mistral AI 2026): DeepSeek V3's latent attention, experts by softmax; queries grow with the position.

Models: Mistral Small 4 119B-A6B (text).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mlcpipe.models.deepseek_v2 import ROUTER
from mlcpipe.models.deepseek_v3 import latent_mixers, read_latent_base
from mlcpipe.models.glm4_moe import NAMES, grouped_routing, sparse_after
from mlcpipe.models.glm4_moe import complete_gguf as complete_glm4_moe
from mlcpipe.nn.base_config import Defaults
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.config import Fields, rope_table
from mlcpipe.nn.decoder import decoder
from mlcpipe.nn.gguf import EXPERTS, LATENT, MLP, MOE, GgufFamily, GgufFile, read_growth, read_latent
from mlcpipe.nn.moe import expert_counts

__all__ = ["GGUF", "NAMES", "build"]

DEFAULTS = Defaults(positions=1048576)
NOPE = 64
DEFAULT_ROPE: Mapping[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a Mistral 4 config.json. Raises ConfigError for unsupported fields."""
    base = read_latent_base(config, DEFAULTS, ROUTER, nope=NOPE)
    fields = base.fields
    rope = Fields(rope_table(fields) or DEFAULT_ROPE, "config.json rope_parameters")
    nope = fields.integer("qk_nope_head_dim", NOPE, high=1024)
    rope.refuse(partial_rotary_factor=[None, base.head_dim / (nope + base.head_dim)])
    table = {name: value for name, value in rope.values.items() if name != "partial_rotary_factor"}
    original = fields.optional_integer("original_max_position_embeddings", None, low=2)
    length = original or rope.integer("original_max_position_embeddings", base.positions, high=1 << 30)
    beta = rope.number("llama_4_scaling_beta", 0.0)
    growth = (beta, length, 0) if beta else None
    mixers = latent_mixers(base, kv_rank=256, q_rank=1024, nope=nope, growth=growth, rope=table)
    routing = grouped_routing(fields, *expert_counts(fields, 128, 4), normalize=True)
    routing = replace(routing, score="softmax", bias=False)
    mlp = sparse_after(base, routing, dense=0, shared=fields.integer("n_shared_experts", 1, low=0), width=2048)
    return decoder(base, mixers, mlp, ropes=[base.read_rope(table, base.theta, original=original)])


def _complete_gguf(file: GgufFile, config: dict[str, Any]) -> None:
    read_latent(file, config)
    complete_glm4_moe(file, config, "softmax")
    read_growth(file, config)


GGUF = GgufFamily("mistral4", _complete_gguf, {**LATENT, **MLP, **MOE}, EXPERTS, latent=True)
