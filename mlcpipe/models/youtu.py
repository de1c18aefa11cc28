"""Youtu-LLM (Tencent 2026): DeepSeek V3's latent attention with dense MLPs.

Models: Youtu-LLM 2B.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlcpipe.models.deepseek_v3 import latent_mixers, read_latent_base
from mlcpipe.nn.base_config import Defaults
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.decoder import decoder
from mlcpipe.nn.gguf import LATENT, MLP, GgufFamily, GgufFile, read_latent

DEFAULTS = Defaults(positions=131072, tied=True)


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a Youtu config.json. Raises ConfigError for unsupported fields."""
    base = read_latent_base(config, DEFAULTS)
    return decoder(base, latent_mixers(base))


def _complete_gguf(file: GgufFile, config: dict[str, Any]) -> None:
    read_latent(file, config)
    for key in ("expert_shared_count", "leading_dense_block_count"):  # of no experts
        file.integer(key, 0)


GGUF = GgufFamily(
    "deepseek2", _complete_gguf, {**LATENT, **MLP}, latent=True,
    applies=lambda file: file.integer("expert_count", 0) == 0,
)  # fmt: skip
