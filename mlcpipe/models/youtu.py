"""Youtu-LLM (Tencent 2026): DeepSeek V3's latent attention with dense MLPs.

Models: Youtu-LLM 2B.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlcpipe.models.deepseek_v3 import latent_mixers, read_latent
from mlcpipe.nn.base_config import Defaults
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.decoder import decoder

DEFAULTS = Defaults(positions=131072, tied=True)


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a Youtu config.json. Raises ConfigError for unsupported fields."""
    base = read_latent(config, DEFAULTS)
    return decoder(base, latent_mixers(base, kv_rank=512, q_rank=1536, nope=128, value=128))
