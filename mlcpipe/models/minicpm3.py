"""MiniCPM 3 (OpenBMB 2024): DeepSeek's latent attention with whole heads rotated in halves; Granite's multipliers.

Models: MiniCPM3-4B.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mlcpipe.models.deepseek_v3 import latent_mixers, read_latent
from mlcpipe.nn.base_config import ROPE_KINDS, Defaults
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.config import rope_table
from mlcpipe.nn.decoder import decoder
from mlcpipe.nn.norm import NormSpec
from mlcpipe.nn.rope import read_rope

DEFAULTS = Defaults(positions=32768, norm=NormSpec(eps=1e-5), tied=True)


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a MiniCPM 3 config.json. Raises ConfigError for unsupported fields."""
    base = read_latent(config, DEFAULTS, rope_interleave=[None, False])
    fields, layers, hidden = base.fields, base.num_layers, base.hidden_size
    mixers = latent_mixers(
        base, kv_rank=256, q_rank=768, nope=64, value=hidden // base.num_heads, interleaved=False
    )
    depth = fields.optional_number("scale_depth", 1.4, low=0.0)
    kinds = (*ROPE_KINDS, "longrope")
    rope = read_rope(rope_table(fields), base.head_dim, base.positions, theta=base.theta, kinds=kinds)
    return decoder(
        base,
        mixers,
        ropes=[rope],
        scale=1.0 if depth is None else depth / math.sqrt(layers),
        embedding_scale=fields.number("scale_emb", 12),
        logit_scale=(fields.optional_number("dim_model_base", 256, low=1e-6) or hidden) / hidden,
    )
