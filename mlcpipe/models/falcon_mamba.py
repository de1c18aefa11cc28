"""Falcon Mamba (TII 2024): Mamba with norms of dt, B and C without weights.

Models: Falcon Mamba 7B.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mlcpipe.models.mamba import DEFAULTS, NAMES, scanning
from mlcpipe.models.mamba import GGUF as MAMBA
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.config import Fields
from mlcpipe.nn.norm import NormSpec

__all__ = ["DEFAULTS", "GGUF", "NAMES", "build"]


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a Falcon Mamba config.json. Raises ConfigError for unsupported fields."""
    eps = Fields(config).number("mixer_rms_eps", 1e-6, low=0.0, high=1.0)
    return scanning(config, NormSpec(eps=eps, weight=False))


GGUF = replace(MAMBA, applies=lambda file: bool(file.get("ssm.dt_b_c_rms", False)))
