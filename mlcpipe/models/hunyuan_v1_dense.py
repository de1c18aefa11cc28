"""Hunyuan dense (Tencent 2025): Llama with norms of heads after rope, whose base grows by a fixed alpha.

Models: Hunyuan 0.5B, 1.8B, 4B, 7B; Hunyuan-MT 7B.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlcpipe.models.qwen2 import complete_gguf
from mlcpipe.nn.base_config import BaseConfig, Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.config import Fields, rope_table
from mlcpipe.nn.decoder import decoder
from mlcpipe.nn.gguf import GgufFamily
from mlcpipe.nn.names import CheckpointNames
from mlcpipe.nn.norm import NormSpec
from mlcpipe.nn.rope import Rope

DEFAULTS = Defaults(positions=2048, norm=NormSpec(eps=1e-5))
NAMES = CheckpointNames(
    layer={"self_attn.q_norm": "self_attn.query_layernorm", "self_attn.k_norm": "self_attn.key_layernorm"}
)
# What published files say and transformers does not read.
FIXED: Mapping[str, list[Any]] = {
    "mlp_bias": [None, False],
    "use_cla": [None, False],
    "use_qk_norm": [None, True],
}


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a Hunyuan config.json. Raises ConfigError for unsupported fields."""
    base = read_base(config, DEFAULTS, **FIXED)
    bias = base.fields.flag("attention_bias", False)
    specs = base.attentions(qkv_bias=bias, o_bias=bias, norm="head", norm_after=True)
    return decoder(base, specs, ropes=[rope_with_alpha(base)])


def rope_with_alpha(base: BaseConfig) -> Rope:
    """Rope of type `dynamic` with `alpha`: theta times alpha^(d / (d - 2)), whatever the length (NTK-aware scaling)."""
    table = Fields(rope_table(base.fields), "config.json rope_scaling")
    alpha = table.optional_number("alpha", None, low=0.0)
    if not alpha or table.get("rope_type", table.get("type")) != "dynamic" or base.head_dim < 4:
        return base.rope()
    theta = table.number("rope_theta", base.theta, low=1.0) * alpha ** (base.head_dim / (base.head_dim - 2))
    return base.read_rope({"rope_theta": theta}, theta)


GGUF = GgufFamily("hunyuan-dense", complete_gguf)
