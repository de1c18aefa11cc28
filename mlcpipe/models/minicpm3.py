"""MiniCPM 3 (OpenBMB 2024): DeepSeek's latent attention with whole heads rotated in halves; Granite's multipliers.

Models: MiniCPM3-4B.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mlcpipe.models.deepseek_v3 import latent_mixers, read_latent_base
from mlcpipe.nn.base_config import ROPE_KINDS, Defaults
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.config import rope_table
from mlcpipe.nn.decoder import decoder
from mlcpipe.nn.gguf import LATENT, MLP, GgufFamily, read_latent
from mlcpipe.nn.norm import NormSpec

DEFAULTS = Defaults(positions=32768, norm=NormSpec(eps=1e-5), tied=True)
NOPE, ROPE = 64, 32


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a MiniCPM 3 config.json. Raises ConfigError for unsupported fields."""
    base = read_latent_base(config, DEFAULTS, {"rope_interleave": [None, False]}, nope=NOPE, rope=ROPE)
    fields, layers, hidden = base.fields, base.num_layers, base.hidden_size
    value = hidden // base.num_heads
    mixers = latent_mixers(base, kv_rank=256, q_rank=768, nope=NOPE, value=value, interleaved=False)
    depth = fields.optional_number("scale_depth", 1.4, low=0.0)
    rope = base.read_rope(rope_table(fields), base.theta, kinds=(*ROPE_KINDS, "longrope"))
    return decoder(
        base,
        mixers,
        ropes=[rope],
        scale=1.0 if depth is None else depth / math.sqrt(layers),
        embedding_scale=fields.number("scale_emb", 12),
        logit_scale=(fields.optional_number("dim_model_base", 256, low=1e-6) or hidden) / hidden,
    )


GGUF = GgufFamily("minicpm3", read_latent, {**LATENT, **MLP}, rope="longrope", latent=True)
