"""Solar Open (Upstage 2026): GLM 4.5's mixtures in every layer, with Llama's attention.

Models: Solar-Open 100B-A12B.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlcpipe.models.glm4_moe import NAMES, grouped_routing, sparse_after
from mlcpipe.nn.base_config import Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.decoder import decoder
from mlcpipe.nn.moe import expert_counts
from mlcpipe.nn.norm import NormSpec

__all__ = ["NAMES", "build"]

DEFAULTS = Defaults(
    positions=131072, num_kv_heads=8, head_dim=128, norm=NormSpec(eps=1e-5), theta=1e6, intermediate_size=10240
)


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a Solar Open config.json. Raises ConfigError for unsupported fields."""
    base = read_base(
        config, DEFAULTS, first_k_dense_replace=[None, 0], mlp_bias=[None, False], sliding_window=[None],
        use_qk_norm=[None, False],
    )  # fmt: skip
    fields = base.fields
    routing = grouped_routing(fields, *expert_counts(fields, 128, 8), normalize=True)
    mlp = sparse_after(base, routing, dense=0, shared=fields.integer("n_shared_experts", 1, low=0), width=1280)
    specs = base.attentions(qkv_bias=fields.flag("attention_bias", False))
    return decoder(base, specs, mlp, ropes=[base.rope(partial=1.0)])
