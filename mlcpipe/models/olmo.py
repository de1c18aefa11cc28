"""OLMo (Groeneveld et al. 2024): Llama with layer norms without weights; q, k and v may be clipped.

Models: OLMo 1B, 7B (the -hf files).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlcpipe.nn.base_config import Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.decoder import decoder
from mlcpipe.nn.gguf import GgufFamily, GgufFile
from mlcpipe.nn.norm import NormSpec

DEFAULTS = Defaults(positions=2048, norm=NormSpec("layer", 1e-5, weight=False))


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for an OLMo config.json. Raises ConfigError for unsupported fields."""
    base = read_base(config, DEFAULTS, mlp_bias=[None, False], rms_norm_eps=[None, DEFAULTS.norm.eps])
    bias = base.fields.flag("attention_bias", False)
    clip = base.fields.optional_number("clip_qkv", None, low=1e-6) or 0.0
    return decoder(base, base.attentions(qkv_bias=bias, o_bias=bias, clip=clip))


def _complete_gguf(file: GgufFile, config: dict[str, Any]) -> None:
    eps = config.pop("rms_norm_eps")
    if abs(eps - DEFAULTS.norm.eps) > 1e-9:
        raise file.error("attention.layer_norm_epsilon", DEFAULTS.norm.eps, eps)
    config["clip_qkv"] = file.number("attention.clamp_kqv", 0.0) or None


GGUF = GgufFamily("olmo", _complete_gguf, interleaved=True)
