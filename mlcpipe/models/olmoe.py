"""OLMoE (Muennighoff et al. 2024): experts in every layer, norms over all heads of q and of k.

Models: OLMoE 1B-7B.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlcpipe.models.qwen2 import complete_gguf
from mlcpipe.nn.base_config import Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.decoder import decoder
from mlcpipe.nn.gguf import EXPERTS, MOE, PRE_NORM, GgufFamily, GgufFile, read_experts
from mlcpipe.nn.moe import Routing, SparseMoE, expert_counts
from mlcpipe.nn.norm import NormSpec

DEFAULTS = Defaults(positions=4096, norm=NormSpec(eps=1e-5))


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for an OLMoE config.json. Raises ConfigError for unsupported fields."""
    base = read_base(config, DEFAULTS, sliding_window=[None], mlp_bias=[None, False])
    fields = base.fields
    bias, clip = fields.flag("attention_bias", False), fields.optional_number("clip_qkv", None, low=1e-6)
    normalize = fields.flag("norm_topk_prob", False)
    routing = Routing(*expert_counts(fields, experts=64, chosen=8), normalize=normalize)
    return decoder(
        base,
        base.attentions(qkv_bias=bias, o_bias=bias, norm="all", clip=clip or 0.0),
        lambda i: SparseMoE(base.hidden_size, base.intermediate_size, routing, base.act),
    )


def _complete_gguf(file: GgufFile, config: dict[str, Any]) -> None:
    complete_gguf(file, config)
    read_experts(file, config)


GGUF = GgufFamily("olmoe", _complete_gguf, {**PRE_NORM, **MOE}, EXPERTS)
