"""ERNIE 4.5 mixtures of experts (Baidu 2025): chosen by biased softmax, beside ones that all tokens use.

Models: ERNIE-4.5-21B-A3B, 300B-A47B.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm.relax.frontend import nn

from mlcpipe.nn.base_config import Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.decoder import decoder
from mlcpipe.nn.gguf import EXPERTS, MOE, PRE_NORM, GgufFamily, GgufFile, read_experts
from mlcpipe.nn.moe import Routing, SparseMoE, expert_counts
from mlcpipe.nn.names import CheckpointNames
from mlcpipe.nn.norm import NormSpec

DEFAULTS = Defaults(positions=131072, num_kv_heads=4, norm=NormSpec(eps=1e-5), theta=5e5, tied=True)
BIAS = "e_score_correction_bias"
NAMES = CheckpointNames(
    unused=("mtp_",),
    layer={"mlp.shared_expert": "mlp.shared_experts", f"mlp.gate.{BIAS}": f"mlp.moe_statics.{BIAS}"},
)


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for an ERNIE 4.5 MoE config.json. Raises ConfigError for unsupported fields."""
    no = [None, False]
    base = read_base(config, DEFAULTS, sliding_window=[None], use_bias=no, attention_bias=no, mlp_bias=no)
    fields, last = base.fields, base.num_layers - 1
    smallest = fields.number("moe_norm_min", 1e-12, low=0.0)
    routing = Routing(*expert_counts(fields, 64, 6), normalize=True, smallest_sum=smallest, bias=True)
    width = fields.integer("moe_intermediate_size", 1536)
    shared = fields.integer("moe_num_shared_experts", 2, low=0, high=4096) * width
    begin, step = fields.integer("moe_layer_start_index", 1, low=0), fields.integer("moe_layer_interval", 1)
    end = fields.integer("moe_layer_end_index", -1, low=-1)

    def mlp(i: int) -> nn.Module:
        if not begin <= i <= (last if end == -1 else end) or (i + 1) % step:
            return base.mlp()
        return SparseMoE(base.hidden_size, width, routing, base.act, shared_width=shared)

    return decoder(base, base.attentions(interleaved=base.head_dim), mlp)


def _complete_gguf(file: GgufFile, config: dict[str, Any]) -> None:
    read_experts(file, config)
    config["moe_num_shared_experts"] = file.integer("expert_shared_count", 0)
    config["moe_layer_start_index"] = file.integer("leading_dense_block_count", 0)
    config["moe_layer_interval"] = file.integer("interleave_moe_layer_step", 1)


GGUF = GgufFamily("ernie4_5-moe", _complete_gguf, {**PRE_NORM, **MOE}, EXPERTS)
