"""MiniMax 01 (MiniMax 2025): lightning attention in most layers, experts; the residual stream is what norms make.

Models: MiniMax-Text-01, MiniMax-M1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlcpipe.models.mixtral import NAMES
from mlcpipe.models.qwen3_5_text import KINDS
from mlcpipe.nn.attention_spec import AttentionSpec
from mlcpipe.nn.base_config import Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.config import layer_kinds
from mlcpipe.nn.decoder import Mixer, decoder
from mlcpipe.nn.decoder_layer import LayerForm
from mlcpipe.nn.lightning import Lightning, LightningSpec
from mlcpipe.nn.moe import Routing, SparseMoE, expert_counts
from mlcpipe.nn.norm import NormSpec

__all__ = ["NAMES", "build"]

DEFAULTS = Defaults(positions=131072, num_kv_heads=8, norm=NormSpec(eps=1e-5), theta=1e6)
# What published files say and no model of the family does otherwise.
FIXED: Mapping[str, list[Any]] = {
    "attention_bias": [None, False],
    "mlp_bias": [None, False],
    "postnorm": [None, True],
    "shared_intermediate_size": [None, 0],
}


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a MiniMax config.json. Raises ConfigError for unsupported fields."""
    base = read_base(config, DEFAULTS, **FIXED)
    fields, count = base.fields, base.num_layers
    rotated = fields.integer("rotary_dim", base.head_dim, high=base.head_dim)
    attention = base.attention(window=fields.optional_integer("sliding_window", None))
    attends = layer_kinds(fields, count, KINDS) or [i % 2 == 0 for i in range(count)]

    def mixer(i: int) -> AttentionSpec | Mixer:
        if attends[i]:
            return attention
        depth = 1 - i / (count - 1 + 1e-5) + 1e-5
        rates = tuple(2.0 ** (-8 * (head + 1) / base.num_heads) * depth for head in range(base.num_heads))
        return Mixer("self_attn", Lightning(LightningSpec(base.hidden_size, base.head_dim, rates, base.act), i))

    def form(kind: str) -> LayerForm:
        parts = (kind, "mlp")
        alpha, beta = (
            [fields.number(f"{part}_{name}_factor", 1.0, low=-1e4, high=1e4) for part in parts]
            for name in ("alpha", "beta")
        )
        return LayerForm(of_norms=(alpha[0], beta[0], alpha[1], beta[1]))

    forms = form("linear_attn"), form("full_attn")
    routing = Routing(*expert_counts(fields, 8, 2), normalize=True)
    return decoder(
        base,
        [mixer(i) for i in range(count)],
        lambda i: SparseMoE(base.hidden_size, base.intermediate_size, routing, base.act),
        form=[forms[one] for one in attends],
        ropes=[base.rope(partial=rotated / base.head_dim)],
    )
