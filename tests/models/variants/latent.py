"""The options of families with latent attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.models.variants.common import LONG, SHORT, YARN, rope

LATENT = {"num_key_value_heads": 4, "head_dim": 8}  # as many as of queries; what is rotated

OWN: Mapping[str, Mapping[str, Any]] = {
    "axk2": {
        **LATENT,
        "n_group": None,
        "topk_group": None,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "gated_norm_rank": 4,
    },
    "deepseek_v2": {**LATENT, "n_group": 1},
    "deepseek_v3": {**LATENT, "topk_group": 1, "first_k_dense_replace": 1},
    **dict.fromkeys(
        ("deepseek_v32", "glm_moe_dsa"),
        {
            **LATENT,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "index_n_heads": 2,
            "index_head_dim": 16,
        },
    ),
    "glm4_moe_lite": LATENT,
    "longcat_flash": {
        **LATENT,
        "num_layers": 2,
        "ffn_hidden_size": 96,
        "expert_ffn_hidden_size": 32,
        "n_routed_experts": 5,
        "zero_expert_num": 3,
        "moe_topk": 3,
    },
    "minicpm3": {**LATENT, "dim_model_base": 32, "q_lora_rank": 24},
    "mistral4": {**LATENT, "head_dim": 24, "first_k_dense_replace": 1},
    "youtu": LATENT,
}

VARIANTS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "deepseek_v2": {
        "grouped": {
            **rope("yarn", **YARN),
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "q_lora_rank": None,
            "v_head_dim": 24,
            "first_k_dense_replace": 1,
            "attention_bias": True,
            "hub": True,
        },
    },
    "deepseek_v3": {
        "halves": {
            **rope("yarn", **YARN),
            "rope_interleave": False,
            "norm_topk_prob": False,
            "n_group": 1,
            "q_lora_rank": None,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "hub": True,
        },
    },
    "glm4_moe_lite": {
        "sparse": {"mlp_layer_types": ["sparse", "dense", "sparse"], "n_group": 1, "rope_interleave": False},
    },
    "minicpm3": {
        "plain": {
            **rope("longrope", short_factor=SHORT[:4], long_factor=LONG[:4], original_max_position_embeddings=96),
            "scale_depth": None,
            "scale_emb": 3,
            "dim_model_base": None,
            "q_lora_rank": None,
            "qk_nope_head_dim": 24,
            "v_head_dim": 16,
            "tie_word_embeddings": False,
        }
    },
    "mistral4": {
        "grown": {
            **rope("yarn", **YARN, llama_4_scaling_beta=0.7),
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
            "q_lora_rank": None,
            "tie_word_embeddings": True,
        }
    },
}
