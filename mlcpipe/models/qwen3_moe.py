"""Qwen 3 mixtures of experts (Yang et al. 2025): Qwen 3 with experts in some or all layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlcpipe.errors import ConfigError
from mlcpipe.models.qwen2 import complete_gguf, window_in_use
from mlcpipe.nn.attention import Attention
from mlcpipe.nn.attention_spec import AttentionSpec
from mlcpipe.nn.base_config import BaseConfig, Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.config import layer_windows
from mlcpipe.nn.decoder_layer import PreNormLayer
from mlcpipe.nn.gguf import EXPERTS, PRE_NORM, GgufFamily, GgufFile, read_experts
from mlcpipe.nn.moe import ExpertNames, SparseMoE, expert_counts

DEFAULTS = Defaults(positions=32768, num_kv_heads=4)
NAMES = ExpertNames(gate="gate_proj", up="up_proj", down="down_proj")


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a Qwen 3 MoE config.json. Raises ConfigError for unsupported fields."""
    base = read_base(config, DEFAULTS, mlp_bias=[None, False])
    bias = base.fields.flag("attention_bias", False)
    window = window_in_use(base)
    windows = layer_windows(base.fields, window, [window is not None] * base.num_layers, fixed=True)
    specs = base.attentions(windows, qkv_bias=bias, o_bias=bias, norm="head")
    experts, chosen = expert_counts(base.fields, experts=128, chosen=8, low=0)
    width = base.fields.integer("moe_intermediate_size", 768)
    normalize = base.fields.flag("norm_topk_prob", False)
    dense = _dense_layers(base, experts)

    def layer(i: int, spec: AttentionSpec) -> PreNormLayer:
        mlp = (
            base.mlp()
            if i in dense
            else SparseMoE(base.hidden_size, width, experts, chosen, normalize=normalize, act=base.act, names=NAMES)
        )
        return PreNormLayer(Attention(spec, i), mlp, base.hidden_size, base.eps)

    return CausalLM(base.facts([base.rope()]), [layer(i, spec) for i, spec in enumerate(specs)])


def _dense_layers(base: BaseConfig, experts: int) -> set[int]:
    """Layers without experts: those in `mlp_only_layers`, and all but every `decoder_sparse_step`-th."""
    listed = base.fields.get("mlp_only_layers", [])
    if not isinstance(listed, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in listed):
        raise ConfigError("field mlp_only_layers", where=base.fields.where, expected="a list of layers", found=listed)
    step = base.fields.integer("decoder_sparse_step", 1)
    return {i for i in range(base.num_layers) if i in listed or experts == 0 or (i + 1) % step}


def _complete_gguf(file: GgufFile, config: dict[str, Any]) -> None:
    complete_gguf(file, config)
    read_experts(file, config)
    width = file.integer("expert_feed_forward_length")
    config.update(moe_intermediate_size=width, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[])


GGUF = GgufFamily("qwen3moe", _complete_gguf, {**PRE_NORM, "ffn_gate_inp": "mlp.gate"}, EXPERTS)
