"""GLM 4.7 Flash (Z.ai 2026): DeepSeek V3's latent attention and mixtures, most of them without groups.

Models: GLM-4.7-Flash 30B-A3B.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlcpipe.errors import ConfigError
from mlcpipe.models.deepseek_v3 import ROUTER, draft_of, latent_mixers, read_latent_base
from mlcpipe.models.glm4_moe import NAMES, grouped_routing, sparse_after
from mlcpipe.nn.base_config import Defaults
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.decoder import decoder
from mlcpipe.nn.moe import expert_counts
from mlcpipe.nn.norm import NormSpec

__all__ = ["NAMES", "build"]

DEFAULTS = Defaults(positions=202752, norm=NormSpec(eps=1e-5))
NOPE = 192
DENSE, SPARSE = "dense", "sparse"


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a GLM 4 MoE Lite config.json. Raises ConfigError for unsupported fields."""
    base = read_latent_base(config, DEFAULTS, ROUTER, nope=NOPE)
    fields, count = base.fields, base.num_layers
    mixers = latent_mixers(base, q_rank=768, nope=NOPE, value=256)
    routing = grouped_routing(fields, *expert_counts(fields, 64, 4), normalize=True, scale=1.8)
    shared = fields.integer("n_shared_experts", 1, low=0)
    first = fields.integer("first_k_dense_replace", 1, low=0)
    kinds = fields.get("mlp_layer_types", [DENSE] * min(first, count) + [SPARSE] * (count - first))
    if not isinstance(kinds, list) or len(kinds) != count or any(kind not in (DENSE, SPARSE) for kind in kinds):
        raise ConfigError("field mlp_layer_types", where=fields.where, expected=f"{count} of {DENSE}, {SPARSE}")
    sparse = sparse_after(base, routing, dense=0, shared=shared, width=1536)
    kinds = [*kinds, SPARSE]  # the last for the layer that drafts
    return decoder(
        base, mixers, lambda i: base.mlp() if kinds[i] == DENSE else sparse(count), drafts=draft_of(base, mixers)
    )
