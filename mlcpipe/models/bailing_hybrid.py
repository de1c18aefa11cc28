"""Ling 3 (inclusionAI 2026): Kimi Linear's delta nets with bounded decays, gated latent attention, groups of experts.

The layer that drafts attends and has a mixture; its tensors' names and sizes are those of vLLM's
`bailing_moe_v3_mtp.py`.

Models: Ling-3.0-tiny; not Ling-3.0-Flash, whose last layers limit what experts multiply.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlcpipe.models.deepseek_v3 import ROUTER, draft_of, latent_spec, read_latent_base
from mlcpipe.models.glm4_moe import grouped_routing
from mlcpipe.models.glm4_moe_lite import sparse_where_listed
from mlcpipe.models.kimi_linear import DELTA, channel_delta, mixers, renamed
from mlcpipe.models.qwen3_5_text import KINDS
from mlcpipe.nn.base_config import BaseConfig, Defaults
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.config import Fields, layer_kinds, rope_table
from mlcpipe.nn.decoder import decoder
from mlcpipe.nn.moe import expert_counts
from mlcpipe.nn.names import CheckpointNames
from mlcpipe.nn.rope import Rope

DEFAULTS = Defaults(positions=262144, theta=6e6)
NAMES = CheckpointNames(
    top={"embed_tokens": "word_embeddings"},
    layer={
        "self_attn": "attention",
        **{name: of.replace("self_attn", "attention") for name, of in DELTA.items()},
        **dict.fromkeys(("self_attn.o_proj", "self_attn.out_proj"), "attention.dense"),
        "self_attn.gate_proj": "attention.g_proj",
        "mlp.gate.e_score_correction_bias": "mlp.gate.expert_bias",
        "mlp.shared_expert": "mlp.shared_experts",
    },
    also={"attention.dense": "attention.o_proj"},
    draft_norm="final_layernorm",
)
# What published files say; Ling 2.6, of the same `model_type`, says otherwise.
FIXED: Mapping[str, list[Any]] = {
    **ROUTER,
    "gated_attention_proj_granularity_type": [None, "head_wise"],
    "group_norm_size": [None, 1],
    "hidden_act": [None, "silu"],
    "linear_silu": [None, True],
    "moe_router_enable_expert_bias": [None, True],
    "no_kda_lora": [None, True],
    "score_function": [None, "sigmoid"],
    "use_mla_nope": [None, False],
    "use_qkv_bias": [None, False],
}


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a Ling 3 config.json. Raises ConfigError for unsupported fields."""
    whole = Fields(config)
    dim = whole.integer("linear_head_dim", whole.integer("head_dim", 128), high=1024)
    base = read_latent_base(renamed(config), DEFAULTS, FIXED, head_dims=[dim])
    fields, count = base.fields, base.num_layers
    limits = ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list")
    fields.refuse(**dict.fromkeys(limits, [None, [0] * count]))
    sizes = (
        fields.integer("linear_num_heads", base.num_heads, high=4096),
        dim,
        fields.integer("linear_conv_kernel_dim", fields.integer("short_conv_kernel_size", 4), low=2, high=64),
    )
    floor = fields.number("kda_lower_bound", -5.0, low=-1e4, high=-1e-4) if fields.flag("kda_safe_gate", True) else 0.0
    delta = channel_delta(base, sizes, z="g_proj", a="f_proj", floor=floor)
    group = fields.integer("layer_group_size", 6)
    attends = layer_kinds(fields, count, KINDS) or [(i + 1) % group == 0 for i in range(count)]
    latent = latent_spec(base, q_rank=None, gated=True)
    routing = grouped_routing(fields, *expert_counts(fields, 512, 8), normalize=True, groups=(8, 4), scale=2.5)
    shared = fields.integer("n_shared_experts", 1, low=0)
    mlp = sparse_where_listed(base, routing, dense=2, shared=shared, width=768)
    blocks = mixers(attends, latent, delta)
    return decoder(base, blocks, mlp, ropes=[_rope(base, dim)], drafts=draft_of(base, blocks))


def _rope(base: BaseConfig, dim: int) -> Rope:
    """All of the rotated part turns: files that call that a part of a head of `dim` say the same once more."""
    table, same = rope_table(base.fields), [None, 1.0, base.head_dim / dim]
    for fields in (base.fields, Fields(table, "config.json rope_parameters")):
        fields.refuse(partial_rotary_factor=same, rotary_dim=[None, base.head_dim])
    return base.read_rope({**table, "partial_rotary_factor": 1.0}, base.theta, partial=1.0)
