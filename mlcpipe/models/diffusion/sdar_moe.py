"""SDAR's mixtures (Cheng et al. 2025): Qwen 3 MoE that denoises blocks, as `sdar` does.

Models: SDAR-30B-A3B.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlcpipe.models import qwen3_moe
from mlcpipe.models.diffusion.sdar import denoising
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.config import Fields


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a config.json of an SDAR mixture. Raises ConfigError for unsupported fields."""
    return denoising(qwen3_moe.build(config), Fields(config), mask=151669, block=4, threshold=0.85)
