"""Qwen 3 mixtures of experts (Yang et al. 2025): Qwen 3 with experts in some or all layers.

Models: Qwen3-30B-A3B, Qwen3-Coder-30B, 235B.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm.relax.frontend import nn

from mlcpipe.errors import ConfigError
from mlcpipe.models.qwen2 import complete_gguf, window_in_use
from mlcpipe.nn.base_config import BaseConfig, Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.config import layer_windows
from mlcpipe.nn.decoder import decoder
from mlcpipe.nn.gguf import EXPERTS, MOE, PRE_NORM, GgufFamily, GgufFile, read_experts
from mlcpipe.nn.moe import Routing, SparseMoE, expert_counts

DEFAULTS = Defaults(positions=32768, num_kv_heads=4)


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a Qwen 3 MoE config.json. Raises ConfigError for unsupported fields."""
    base = read_base(config, DEFAULTS, mlp_bias=[None, False])
    bias = base.fields.flag("attention_bias", False)
    window = window_in_use(base)
    windows = layer_windows(base.fields, window, [window is not None] * base.num_layers, fixed=True)
    specs = base.attentions(windows, qkv_bias=bias, o_bias=bias, norm="head")
    experts, chosen = expert_counts(base.fields, experts=128, chosen=8, low=0)
    width = base.fields.integer("moe_intermediate_size", 768)
    dense = dense_layers(base, experts)

    routing = Routing(experts, chosen, normalize=base.fields.flag("norm_topk_prob", False))

    def mlp(i: int) -> nn.Module:
        return base.mlp() if i in dense else SparseMoE(base.hidden_size, width, routing, base.act)

    return decoder(base, specs, mlp)


def dense_layers(base: BaseConfig, experts: int) -> set[int]:
    """Layers without experts: those in `mlp_only_layers`, and all but every `decoder_sparse_step`-th."""
    listed = base.fields.get("mlp_only_layers", [])
    if not isinstance(listed, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in listed):
        raise ConfigError("field mlp_only_layers", where=base.fields.where, expected="a list of layers", found=listed)
    step = base.fields.integer("decoder_sparse_step", 1)
    return {i for i in range(base.num_layers) if i in listed or experts == 0 or (i + 1) % step}


def _complete_gguf(file: GgufFile, config: dict[str, Any]) -> None:
    complete_gguf(file, config)
    read_experts(file, config)
    config.update(norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[])


GGUF = GgufFamily("qwen3moe", _complete_gguf, {**PRE_NORM, **MOE}, EXPERTS)
