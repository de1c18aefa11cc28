"""A.X-K2 (SK Telecom 2026): DeepSeek V3.2 with one matrix for queries and gates of outputs, low-rank gates of norms.

Models: A.X-K2-Light (up to `index_topk` tokens, of which the indexer picks all; without groups of experts).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op

from mlcpipe.models.deepseek_v3 import ROUTER, read_latent_base
from mlcpipe.models.deepseek_v32 import indexed, without_picks
from mlcpipe.models.glm4_moe import NAMES as GLM4_MOE
from mlcpipe.nn.base_config import BaseConfig, Defaults
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.linear import Linear
from mlcpipe.nn.moe import SparseMoE

DEFAULTS = Defaults(positions=131072)
NAMES = replace(
    GLM4_MOE,
    layer={
        **GLM4_MOE.layer,
        "self_attn.q_gate_proj": "self_attn.q_b_proj",
        **{
            f"{of}_layernorm.{x}": f"{of}_layernorm.W_{x}" for of in ("input", "post_attention") for x in ("down", "up")
        },
    },
)
NOPE = VALUE = 64


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for an A.X-K2 config.json. Raises ConfigError for unsupported fields."""
    base = read_latent_base(without_picks(config), DEFAULTS, ROUTER, nope=NOPE, rope=32)
    # Of groups it has those that are not chosen at 0, not below all others.
    base.fields.refuse(n_group=[None, 1], topk_group=[None, 1])
    model = indexed(
        base, config, groups=(1, 1), experts=128, dense=1, width=512, kv_rank=128, q_rank=384, nope=NOPE, value=VALUE,
        query_gate=True,
    )  # fmt: skip
    for layer in model.model.layers:
        layer.input_layernorm = GatedNorm(base)
        if isinstance(layer.mlp, SparseMoE):
            layer.post_attention_layernorm = GatedNorm(base)
    return model


class GatedNorm(nn.Module):
    """y * sigmoid(up(silu(down(y)))) with y = norm(x)."""

    def __init__(self, base: BaseConfig) -> None:
        rank = base.fields.integer("gated_norm_rank", 16, high=4096)
        self.norm = base.norm(base.hidden_size)
        self.down = Linear(base.hidden_size, rank, quantize=False)
        self.up = Linear(rank, base.hidden_size, quantize=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [m, hidden] -> [m, hidden]."""
        y = self.norm(x)
        return op.multiply(y, op.sigmoid(self.up(op.silu(self.down(y)))))
