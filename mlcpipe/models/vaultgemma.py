"""VaultGemma (Google 2025): Gemma 2 without the norms after attention and MLP.

Models: VaultGemma 1B.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlcpipe.models.gemma2 import build_of
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.decoder_layer import LayerForm


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a VaultGemma config.json. Raises ConfigError for unsupported fields."""
    return build_of(config, LayerForm(before_mlp="pre_feedforward_layernorm"))
