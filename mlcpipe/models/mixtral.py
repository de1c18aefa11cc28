"""Mixtral (Jiang et al. 2024): Mistral with a mixture of experts in every layer.

Models: Mixtral 8x7B, 8x22B.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlcpipe.models.llama import complete_gguf
from mlcpipe.nn.base_config import Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.config import layer_windows
from mlcpipe.nn.decoder import decoder
from mlcpipe.nn.gguf import EXPERTS, MOE, PRE_NORM, GgufFamily, GgufFile, read_experts
from mlcpipe.nn.moe import Routing, SparseMoE, expert_counts
from mlcpipe.nn.names import CheckpointNames
from mlcpipe.nn.norm import NormSpec

DEFAULTS = Defaults(positions=4096 * 32, num_kv_heads=8, norm=NormSpec(eps=1e-5), theta=1e6)
PARTS = {"gate": "w1", "up": "w3", "down": "w2"}
NAMES = CheckpointNames(
    layer={
        "mlp": "block_sparse_moe",
        **{f"mlp.experts.{{}}.{x}_proj": f"block_sparse_moe.experts.{{}}.{w}" for x, w in PARTS.items()},
    }
)


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a Mixtral config.json. Raises ConfigError for unsupported fields."""
    base = read_base(config, DEFAULTS, attention_bias=[None, False], mlp_bias=[None, False])
    window = base.fields.optional_integer("sliding_window", None)
    windows = layer_windows(base.fields, window, [window is not None] * base.num_layers, fixed=True)
    experts, chosen = expert_counts(base.fields, experts=8, chosen=2)
    routing = Routing(experts, chosen, normalize=True)
    return decoder(
        base,
        base.attentions(windows),
        lambda i: SparseMoE(base.hidden_size, base.intermediate_size, routing, base.act),
    )


def _complete_gguf(file: GgufFile, config: dict[str, Any]) -> None:
    complete_gguf(file, config)
    read_experts(file, config)


GGUF = GgufFamily(
    "llama",
    _complete_gguf,
    {**PRE_NORM, **MOE} | {f"ffn_{x}.{i}": f"mlp.experts.{i}.{x}_proj" for i in range(64) for x in PARTS},
    EXPERTS,
    applies=lambda file: bool(file.integer("expert_count", 0)),
    interleaved=True,
)
