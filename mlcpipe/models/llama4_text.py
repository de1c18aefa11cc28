"""Llama 4 (Meta 2025): norms of heads after rope, layers without rope, experts whose inputs their scores multiply.

Models: Llama 4 Scout, Maverick (text, up to the chunk of 8192 tokens); MobileLLM-R1 140M, 360M, 950M.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tvm.relax.frontend import nn

from mlcpipe.errors import ConfigError
from mlcpipe.models.smollm3 import rotated_layers
from mlcpipe.nn.base_config import BaseConfig, Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.decoder import decoder
from mlcpipe.nn.gguf import EXPERTS, MOE, PRE_NORM, GgufFamily, GgufFile, read_experts
from mlcpipe.nn.moe import Routing, SparseMoE, expert_counts
from mlcpipe.nn.names import CheckpointNames
from mlcpipe.nn.norm import NormSpec

DEFAULTS = Defaults(positions=131072, num_kv_heads=8, head_dim=128, norm=NormSpec(eps=1e-5), theta=5e5)
NAMES = CheckpointNames(layer={"mlp": "feed_forward", "mlp.gate": "feed_forward.router"})
DEFAULT_CHUNK = 8192
MOST_GGUF_EXPERTS_WITH_NORMS = 127  # as llama.cpp tells Scout from Maverick


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a Llama 4 text config.json. Raises ConfigError for unsupported fields."""
    base = read_base(config, DEFAULTS, mlp_bias=[None, False])
    fields, rope = base.fields, base.rope()
    rotated = rotated_layers(base)
    normed, bias = fields.flag("use_qk_norm", True), fields.flag("attention_bias", False)
    growth = None
    if fields.flag("attn_temperature_tuning", True):
        growth = (fields.number("attn_scale", 0.1), fields.integer("floor_scale", 8192), 1)
    spec = base.attention(qkv_bias=bias, o_bias=bias, norm_of=replace(base.norm, weight=False))
    specs = [
        replace(spec, interleaved=base.head_dim, norm="head" if normed else "") if one else replace(spec, growth=growth)
        for one in rotated
    ]
    sparse = _sparse_layers(base)
    return decoder(
        base, specs, lambda i: _mlp(base, i in sparse), ropes=[rope], rotated=rotated, bound=_chunk(base, rotated)
    )


def _chunk(base: BaseConfig, rotated: list[bool]) -> int:
    """The tokens up to which attention within chunks is attention to all; 0: no layer has chunks."""
    types = base.fields.get("layer_types") or ["chunked_attention" if one else "full_attention" for one in rotated]
    known = ("chunked_attention", "full_attention")
    if not isinstance(types, list) or len(types) != base.num_layers or any(one not in known for one in types):
        expected = f"{base.num_layers} of {', '.join(known)}"
        raise ConfigError("field layer_types", where=base.fields.where, expected=expected, found=str(types)[:80])
    chunk = base.fields.optional_integer("attention_chunk_size", DEFAULT_CHUNK)
    return chunk if chunk and known[0] in types else 0


def _sparse_layers(base: BaseConfig) -> range | list[int]:
    """The layers with experts: `moe_layers`, else every `interleave_moe_layer_step`-th."""
    stated = base.fields.get("moe_layers")
    if stated is None:
        step = base.fields.integer("interleave_moe_layer_step", 1)
        return range(step - 1, base.num_layers, step)
    if not isinstance(stated, list) or any(type(one) is not int or not 0 <= one < base.num_layers for one in stated):
        raise ConfigError("field moe_layers", where=base.fields.where, expected="numbers of layers", found=stated)
    return stated


def _mlp(base: BaseConfig, sparse: bool) -> nn.Module:
    if not sparse:
        return base.mlp(width=base.fields.integer("intermediate_size_mlp", 16384))
    width, routing = base.intermediate_size, Routing(*expert_counts(base.fields, 16, 1), "sigmoid", of_input=True)
    return SparseMoE(base.hidden_size, width, routing, base.act, shared_width=width)


def _complete_gguf(file: GgufFile, config: dict[str, Any]) -> None:
    """llama.cpp, too, leaves rope out of every fourth layer; its files do not say so."""
    read_experts(file, config, "sigmoid")
    config["attention_bias"] = "blk.0.attn_q.bias" in file
    config["intermediate_size_mlp"] = config["intermediate_size"]
    config["intermediate_size"] = config["moe_intermediate_size"]
    config["interleave_moe_layer_step"] = file.integer("interleave_moe_layer_step")
    config["use_qk_norm"] = config["num_experts"] <= MOST_GGUF_EXPERTS_WITH_NORMS


GGUF = GgufFamily("llama4", _complete_gguf, {**PRE_NORM, **MOE}, EXPERTS)
