"""Small config.json contents of every family, without weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm.relax.frontend import nn

from mlcpipe.models import build_model, gguf_families, model_types
from mlcpipe.nn.causal_lm import CausalLM

SIZES: Mapping[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "full_attn_idxs": [1, 3],
    "num_kv_shared_layers": 0,
    "block_multiple_of": 16,
}
# Latent attention has as many heads of keys as of queries.
_LATENT = {"num_key_value_heads": 4, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16}
# Layers of several kinds, of which one attends.
KINDS: Mapping[str, Mapping[str, Any]] = {
    "bamba": {"attn_layer_indices": [3]},
    "bailing_hybrid": {**_LATENT, "layer_group_size": 4, "n_group": 1, "topk_group": 1, "linear_head_dim": 16},
    **dict.fromkeys(("axk2", "deepseek_v2", "glm4_moe_lite", "minicpm3", "mistral4", "youtu"), _LATENT),
    **dict.fromkeys(("deepseek_v3", "deepseek_v32", "glm_moe_dsa"), {**_LATENT, "n_group": 1, "topk_group": 1}),
    "falcon_mamba": {},  # norms of hidden_size / 16 numbers
    "falcon_h1": {"mamba_n_heads": 4, "mamba_d_ssm": 64},
    "granitemoehybrid": {"layer_types": ["mamba"] * 3 + ["attention"]},
    "jamba": {"attn_layer_period": 4, "attn_layer_offset": 3},
    "kimi_linear": {**_LATENT, "linear_attn_config": {"full_attn_layers": [4], "num_heads": 4, "head_dim": 16}},
    "mamba2": {"num_heads": 8, "head_dim": 16, "num_attention_heads": 8},
    "mimo_v2_flash": {"head_dim": 48, "v_head_dim": 32},
    "longcat_flash": {
        **_LATENT,
        "num_layers": 2,
        "n_routed_experts": 4,
        "zero_expert_num": 2,
        "moe_topk": 2,
        "expert_ffn_hidden_size": 16,
    },
    "minimax": {"layer_types": ["linear_attention"] * 3 + ["full_attention"]},
    "rwkv7": {f"{name}_low_rank_dim": 8 for name in ("decay", "a", "v", "gate")},
    "zamba2": {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "head_dim": 32, "mamba_ngroups": 2},
    "nemotron_h": {"hybrid_override_pattern": "M-E*", "n_groups": 2},
}
FAMILIES = tuple(model_types())
EXPERTS = tuple(name for name, family in gguf_families().items() if family.experts)
LONG = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


def config(family: str, **fields: Any) -> dict[str, Any]:
    """A small config.json of a family. Mixtures get few experts."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "enable_moe_block": True}
    return {"model_type": family, **SIZES, **(experts if family in EXPERTS else {}), **KINDS.get(family, {}), **fields}


def build(family: str, **fields: Any) -> CausalLM:
    return build_model(config(family, **fields))


def names(model: CausalLM) -> set[str]:
    return {name for name, _ in model.named_parameters()}


def traits(block: Any) -> set[str]:
    """What a model is made of, as text: its parameters, and what its blocks were built with."""
    found: set[str] = set()
    for name, value in vars(block).items():
        if isinstance(value, nn.Parameter):
            found.add(f"{name} {value.shape}")
        elif isinstance(value, nn.Module):
            found |= {f"{name}.{trait}" for trait in traits(value)}
        elif isinstance(value, list):
            found |= {f"{name}.{i}.{trait}" for i, one in enumerate(value) for trait in traits(one)}
        else:
            found.add(f"{name}={value}")
    return found


def slides(count: int) -> list[str]:
    return ["sliding_attention"] * count + ["full_attention"] * (4 - count)
