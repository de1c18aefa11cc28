"""Phi-3.5 mixtures of experts (Abdin et al. 2024): layer norms, longrope, two experts weighed by SparseMixer.

Models: Phi-3.5-MoE, Phi-mini-MoE, Phi-tiny-MoE.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlcpipe.errors import ConfigError
from mlcpipe.models.mixtral import NAMES as NAMES
from mlcpipe.nn.base_config import BaseConfig, Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.config import Fields, layer_windows, rope_table
from mlcpipe.nn.decoder import decoder
from mlcpipe.nn.gguf import EXPERTS, MOE, PRE_NORM, GgufFamily, GgufFile, read_experts
from mlcpipe.nn.moe import Routing, SparseMoE, expert_counts
from mlcpipe.nn.norm import NormSpec
from mlcpipe.nn.rope import Rope, read_rope

DEFAULTS = Defaults(positions=131072, num_kv_heads=8, norm=NormSpec("layer", 1e-5, bias=True), theta=1e6)
DEFAULT_JITTER = 0.01


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a Phi-3.5 MoE config.json. Raises ConfigError for unsupported fields."""
    base = read_base(config, DEFAULTS, mlp_bias=[None, False])
    fields, bias = base.fields, base.fields.flag("attention_bias", False)
    window = fields.optional_integer("sliding_window", None)
    windows = layer_windows(fields, window, [window is not None] * base.num_layers, fixed=True)
    experts, chosen = expert_counts(fields, 16, 2)
    if chosen != 2:
        raise ConfigError("field num_experts_per_tok", where=fields.where, expected=2, found=chosen)
    jitter = fields.number("router_jitter_noise", DEFAULT_JITTER, low=0.0)
    routing = Routing(experts, 2, "sparsemixer", jitter=jitter)
    return decoder(
        base,
        base.attentions(windows, qkv_bias=bias, o_bias=bias),
        lambda i: SparseMoE(base.hidden_size, base.intermediate_size, routing, base.act),
        ropes=[_rope(base)],
        head_bias=fields.flag("lm_head_bias", False),
    )


def _rope(base: BaseConfig) -> Rope:
    """Longrope whose cosines and sines have a factor of their own, `short_mscale`, which `long_mscale` equals."""
    table = dict(rope_table(base.fields))
    for fields in (base.fields, Fields(table, "config.json rope_parameters")):
        fields.refuse(partial_rotary_factor=[None, 1, 1.0])
    original = base.fields.optional_integer("original_max_position_embeddings", None, low=2)
    short, long = table.pop("short_mscale", None), table.pop("long_mscale", None)
    if short != long:
        raise ConfigError("field long_mscale", where="config.json rope_scaling", expected=short, found=long)
    if short is not None:
        table["attention_factor"] = short
    kinds = ("default", "longrope")
    return read_rope(table, base.head_dim, base.positions, theta=base.theta, original=original, kinds=kinds)


def _complete_gguf(file: GgufFile, config: dict[str, Any]) -> None:
    read_experts(file, config)
    config["attention_bias"], config["lm_head_bias"] = "blk.0.attn_q.bias" in file, "output.bias" in file
    config["sliding_window"] = file.integer("attention.sliding_window", 0) or None


GGUF = GgufFamily("phimoe", _complete_gguf, {**PRE_NORM, **MOE}, EXPERTS, rope="longrope")
