"""Hunyuan 3 (Tencent 2026): norms of heads, experts chosen by biased sigmoids beside ones that all tokens use.

The layer that drafts has a mixture; its tensors' names and sizes are those of vLLM's `hy_v3_mtp.py`.

Models: Hy3-preview, Hy3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlcpipe.models.glm4_moe import drafts_itself
from mlcpipe.models.glm4_moe_lite import sparse_where_listed
from mlcpipe.nn.base_config import Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.decoder import decoder
from mlcpipe.nn.gguf import EXPERTS, MOE, PRE_NORM, GgufFamily, GgufFile, read_drafts, read_experts
from mlcpipe.nn.moe import Routing, expert_counts
from mlcpipe.nn.names import CheckpointNames
from mlcpipe.nn.norm import NormSpec

DEFAULTS = Defaults(positions=131072, num_kv_heads=8, head_dim=128, norm=NormSpec(eps=1e-5), theta=11_158_840.0)
NAMES = CheckpointNames(
    layer={
        "mlp.gate": "mlp.router.gate",
        "mlp.gate.e_score_correction_bias": "mlp.expert_bias",
        "mlp.shared_expert": "mlp.shared_mlp",
    },
    draft_norm="final_layernorm",
)
# What published files say and no model of the family does otherwise.
FIXED: Mapping[str, list[Any]] = {
    "mlp_bias": [None, False],
    "moe_router_enable_expert_bias": [None, True],
    "moe_router_use_sigmoid": [None, True],
    "qk_norm": [None, True],
    "route_norm": [None, True],
    "sliding_window": [None],
}


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a Hunyuan 3 config.json. Raises ConfigError for unsupported fields."""
    base = read_base(config, DEFAULTS, **FIXED)
    fields = base.fields
    bias = fields.flag("attention_bias", False)
    routing = Routing(
        *expert_counts(fields, 192, 8), "sigmoid", normalize=True, epsilon=1e-20, bias=True,
        scale=fields.number("router_scaling_factor", 2.826),
    )  # fmt: skip
    shared = fields.integer("num_shared_experts", 1, high=4096)
    mlp = sparse_where_listed(base, routing, dense=1, shared=shared, width=1536)
    specs = base.attentions(qkv_bias=bias, o_bias=bias, norm="head")
    return decoder(base, specs, mlp, drafts=specs[-1] if drafts_itself(base) else None)


def _complete_gguf(file: GgufFile, config: dict[str, Any]) -> None:
    """The layers with a router are those with experts."""
    read_drafts(file, config)
    read_experts(file, config, "sigmoid")
    layers, width = min(config["num_hidden_layers"], 1024), config["moe_intermediate_size"]
    shared = file.integer("expert_shared_feed_forward_length", 0) or width
    if not width or shared % width:
        raise file.error("expert_shared_feed_forward_length", f"a multiple of {width}, the width of an expert", shared)
    config |= {
        "attention_bias": "blk.0.attn_q.bias" in file,
        "mlp_layer_types": ["sparse" if f"blk.{i}.ffn_gate_inp.weight" in file else "dense" for i in range(layers)],
        "num_shared_experts": shared // width,
        "route_norm": bool(file.get("expert_weights_norm", False)),
        "router_scaling_factor": file.number("expert_weights_scale", 0.0) or 1.0,
    }


GGUF = GgufFamily("hy_v3", _complete_gguf, {**PRE_NORM, **MOE}, EXPERTS)
