"""GLM 4.7 Flash (Z.ai 2026): DeepSeek V3's latent attention and mixtures, most of them without groups.

Models: GLM-4.7-Flash 30B-A3B.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tvm.relax.frontend import nn

from mlcpipe.models.deepseek_v3 import ROUTER, draft_of, latent_mixers, read_latent_base
from mlcpipe.models.glm4_moe import NAMES, grouped_routing, mixture
from mlcpipe.nn.base_config import BaseConfig, Defaults
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.config import layer_kinds
from mlcpipe.nn.decoder import decoder
from mlcpipe.nn.moe import Routing, expert_counts
from mlcpipe.nn.norm import NormSpec

__all__ = ["NAMES", "build"]

DEFAULTS = Defaults(positions=202752, norm=NormSpec(eps=1e-5))
NOPE = 192


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a GLM 4 MoE Lite config.json. Raises ConfigError for unsupported fields."""
    base = read_latent_base(config, DEFAULTS, ROUTER, nope=NOPE)
    fields = base.fields
    mixers = latent_mixers(base, q_rank=768, nope=NOPE, value=256)
    routing = grouped_routing(fields, *expert_counts(fields, 64, 4), normalize=True, scale=1.8)
    shared = fields.integer("n_shared_experts", 1, low=0)
    mlp = sparse_where_listed(base, routing, dense=1, shared=shared, width=1536)
    return decoder(base, mixers, mlp, drafts=draft_of(base, mixers))


def sparse_where_listed(
    base: BaseConfig, routing: Routing, *, dense: int, shared: int, width: int
) -> Callable[[int], nn.Module]:
    """As `sparse_after`, but `mlp_layer_types` may list the layers; the one that drafts has a mixture."""
    fields, count = base.fields, base.num_layers
    first, sparse = fields.integer("first_k_dense_replace", dense, low=0), mixture(base, routing, shared, width)
    listed = layer_kinds(fields, count, {"dense": False, "sparse": True}, name="mlp_layer_types")
    kinds = [*(listed or [i >= first for i in range(count)]), True]
    return lambda i: sparse() if kinds[i] else base.mlp()


def dense_after(base: BaseConfig, mlp: Callable[[int], nn.Module]) -> Callable[[int], nn.Module]:
    """`mlp` for the model's layers, a dense one for the layer that drafts."""
    return lambda i: mlp(i) if i < base.num_layers else base.mlp()
