"""Mixtral (Jiang et al. 2024): Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlcpipe.models.llama import complete_gguf
from mlcpipe.nn.attention import Attention
from mlcpipe.nn.attention_spec import AttentionSpec
from mlcpipe.nn.base_config import Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.config import layer_windows
from mlcpipe.nn.decoder_layer import PreNormLayer
from mlcpipe.nn.gguf import PRE_NORM, GgufFamily, GgufFile, read_experts
from mlcpipe.nn.moe import ExpertNames, SparseMoE, expert_counts

DEFAULTS = Defaults(positions=4096 * 32, num_kv_heads=8, eps=1e-5, theta=1e6)
NAMES = ExpertNames(gate="w1", up="w3", down="w2")


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a Mixtral config.json. Raises ConfigError for unsupported fields."""
    base = read_base(config, DEFAULTS, attention_bias=[None, False], mlp_bias=[None, False])
    window = base.fields.optional_integer("sliding_window", None)
    windows = layer_windows(base.fields, window, [window is not None] * base.num_layers, fixed=True)
    experts, chosen = expert_counts(base.fields, experts=8, chosen=2)
    specs = base.attentions(windows)

    def layer(i: int, spec: AttentionSpec) -> PreNormLayer:
        moe = SparseMoE(
            base.hidden_size,
            base.intermediate_size,
            experts,
            chosen,
            normalize=True,
            act=base.act,
            names=NAMES,
        )
        names = (*PreNormLayer.NAMES[:-1], "block_sparse_moe")
        return PreNormLayer(Attention(spec, i), moe, base.hidden_size, base.eps, names=names)

    return CausalLM(base.facts([base.rope()]), [layer(i, spec) for i, spec in enumerate(specs)])


def _complete_gguf(file: GgufFile, config: dict[str, Any]) -> None:
    complete_gguf(file, config)
    read_experts(file, config)


_PARTS = {"gate": NAMES.gate, "up": NAMES.up, "down": NAMES.down}
GGUF = GgufFamily(
    "llama",
    _complete_gguf,
    {**PRE_NORM, "ffn_gate_inp": "block_sparse_moe.gate"}
    | {f"ffn_{x}.{i}": f"block_sparse_moe.experts.{i}.{w}" for i in range(64) for x, w in _PARTS.items()},
    {f"ffn_{x}_exps": f"block_sparse_moe.experts.{{}}.{w}" for x, w in _PARTS.items()},
    applies=lambda file: bool(file.integer("expert_count", 0)),
    interleaved=True,
)
