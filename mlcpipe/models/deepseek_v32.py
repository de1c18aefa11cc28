"""DeepSeek V3.2 (DeepSeek 2025): DeepSeek V3 whose queries see the 2048 tokens that an indexer picks.

Models: DeepSeek V3.2 (up to `index_topk` tokens, of which the indexer picks all).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlcpipe.models.deepseek_v3 import ROUTER, latent_spec, read_latent_base
from mlcpipe.models.glm4_moe import NAMES, grouped_routing
from mlcpipe.models.glm4_moe_lite import sparse_where_listed
from mlcpipe.nn.base_config import BaseConfig, Defaults
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.config import Fields, layer_kinds
from mlcpipe.nn.decoder import Mixer, decoder
from mlcpipe.nn.latent_attention import LatentAttention
from mlcpipe.nn.moe import expert_counts

__all__ = ["NAMES", "build"]

DEFAULTS = Defaults(positions=163840)
PICKED = 2048


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a DeepSeek V3.2 config.json. Raises ConfigError for unsupported fields."""
    base = read_latent_base(without_picks(config), DEFAULTS, ROUTER)
    return indexed(base, config, groups=(8, 4))


def without_picks(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json without the field that other families of latent attention refuse."""
    return {name: value for name, value in config.items() if name != "index_topk"}


def indexed(
    base: BaseConfig, config: Mapping[str, Any], *, groups: tuple[int, int], experts: int = 256, dense: int = 3,
    width: int = 2048, **sizes: Any,
) -> CausalLM:  # fmt: skip
    """The model without its indexers, for as many tokens as they pick; `sizes` are defaults of `latent_spec`.

    The family's other defaults: `groups` of experts and of the chosen ones, `experts` of a layer, `dense` layers before
    them, and the `width` of an expert. Raises ConfigError.
    """
    fields, count = base.fields, base.num_layers
    layer_kinds(fields, count, {"indexed_attention": None})
    picked = Fields(config).integer("index_topk", PICKED)
    spec = latent_spec(base, **sizes)
    routing = grouped_routing(fields, *expert_counts(fields, experts, 8), normalize=True, groups=groups, scale=2.5)
    shared = fields.integer("n_shared_experts", 1, low=0)
    mlp = sparse_where_listed(base, routing, dense=dense, shared=shared, width=width)
    mixers = [Mixer("self_attn", LatentAttention(spec, i)) for i in range(count)]
    model = decoder(base, mixers, mlp, bound=picked)
    for layer in model.model.layers:
        layer.unused = ("self_attn.indexer.",)
    return model
