"""OLMo 2 (Walsh et al. 2024): norms after attention and MLP, and over all heads of q and of k.

Models: OLMo 2 1B, 7B, 13B, 32B.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlcpipe.models.qwen2 import complete_gguf
from mlcpipe.nn.base_config import Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.decoder import decoder
from mlcpipe.nn.decoder_layer import POST_NORM
from mlcpipe.nn.gguf import ATTENTION, MLP, POST_NORMS, GgufFamily
from mlcpipe.nn.norm import NormSpec

DEFAULTS = Defaults(positions=2048, norm=NormSpec(eps=1e-5))


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for an OLMo 2 config.json. Raises ConfigError for unsupported fields."""
    base = read_base(config, DEFAULTS, sliding_window=[None], mlp_bias=[None, False])
    bias = base.fields.flag("attention_bias", False)
    return decoder(base, base.attentions(qkv_bias=bias, o_bias=bias, norm="all"), form=POST_NORM)


GGUF = GgufFamily("olmo2", complete_gguf, {**ATTENTION, **MLP, **POST_NORMS})
