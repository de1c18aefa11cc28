"""Qwen 1.5 and 2 mixtures of experts (Qwen team 2024): Qwen 2 with experts, one of which all tokens use, gated.

Models: Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm.relax.frontend import nn

from mlcpipe.models.qwen2 import DEFAULT_FULL_LAYERS, window_in_use
from mlcpipe.models.qwen3_moe import dense_layers
from mlcpipe.nn.base_config import Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.config import layer_windows
from mlcpipe.nn.decoder import decoder
from mlcpipe.nn.gguf import EXPERTS, MOE, PRE_NORM, GgufFamily, GgufFile, read_experts
from mlcpipe.nn.moe import Routing, SparseMoE, expert_counts

DEFAULTS = Defaults(positions=32768, num_kv_heads=16)


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a Qwen 2 MoE config.json. Raises ConfigError for unsupported fields."""
    base = read_base(config, DEFAULTS, attention_bias=[None], mlp_bias=[None, False])
    fields, window = base.fields, window_in_use(base)
    upper = fields.integer("max_window_layers", DEFAULT_FULL_LAYERS, low=0)
    slides = [window is not None and i % 2 == 0 and i < upper for i in range(base.num_layers)]
    specs = base.attentions(layer_windows(fields, window, slides), qkv_bias=fields.flag("qkv_bias", True))
    experts, chosen = expert_counts(fields, experts=60, chosen=4, low=0)
    width, shared = (
        fields.integer("moe_intermediate_size", 1408),
        fields.integer("shared_expert_intermediate_size", 5632),
    )
    dense = dense_layers(base, experts)
    routing = Routing(experts, chosen, normalize=fields.flag("norm_topk_prob", False))

    def mlp(i: int) -> nn.Module:
        if i in dense:
            return base.mlp()
        return SparseMoE(base.hidden_size, width, routing, base.act, shared_width=shared, shared_gate=True)

    return decoder(base, specs, mlp)


def _complete_gguf(file: GgufFile, config: dict[str, Any]) -> None:
    read_experts(file, config)
    shared = file.integer("expert_shared_feed_forward_length", config["intermediate_size"])
    config.update(shared_expert_intermediate_size=shared, qkv_bias="blk.0.attn_q.bias" in file)


GGUF = GgufFamily("qwen2moe", _complete_gguf, {**PRE_NORM, **MOE}, EXPERTS)
