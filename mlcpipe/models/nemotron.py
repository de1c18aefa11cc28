"""Nemotron 4, Minitron (NVIDIA 2024): layer norms that store their weight minus 1, squared ReLU.

Models: Minitron 4B, 8B; Nemotron 4 15B.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlcpipe.models.llama import complete_gguf
from mlcpipe.nn.base_config import Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.decoder import decoder
from mlcpipe.nn.gguf import GgufFamily
from mlcpipe.nn.norm import NormSpec

DEFAULTS = Defaults(
    positions=4096,
    norm=NormSpec("layer", 1e-5, offset=1.0, bias=True),
    act="relu2",
    names={"rms_norm_eps": "norm_eps"},
)
DEFAULT_ROTATED = 0.5


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a Nemotron config.json. Raises ConfigError for unsupported fields."""
    base = read_base(config, DEFAULTS)
    bias, mlp_bias = base.fields.flag("attention_bias", False), base.fields.flag("mlp_bias", False)
    return decoder(
        base,
        base.attentions(qkv_bias=bias, o_bias=bias),
        lambda i: base.plain_mlp(mlp_bias),
        ropes=[base.rope(partial=DEFAULT_ROTATED)],
    )


GGUF = GgufFamily("nemotron", complete_gguf, rope="partial", norm_offset=DEFAULTS.norm.offset)
