"""The options of mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.models.variants.common import FULL_BETWEEN, LONG, SHORT, WINDOWED, rope

OWN: Mapping[str, Mapping[str, Any]] = {
    "cohere2_moe": {**FULL_BETWEEN, "mlp_layer_types": ["sparse", "dense", "sparse"], "num_shared_experts": 2},
    "laguna": {
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "num_attention_heads_per_layer": [4, 8, 2],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "moe_routed_scaling_factor": 2.5,
        "moe_router_logit_softcapping": 0.5,
    },
    "exaone_moe": {**FULL_BETWEEN, "num_experts": 8},
    "llama4_text": {"num_experts_per_tok": 1},
    "mellum": {
        **FULL_BETWEEN,
        "mlp_layer_types": ["sparse", "dense", "sparse"],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e3},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e2},
        },
    },
    "mimo_v2_flash": {
        **FULL_BETWEEN,
        "head_dim": 48,
        "v_head_dim": 32,
        "n_group": 1,
        "num_key_value_heads": 1,
        "n_routed_experts": 4,
    },
}

VARIANTS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "afmoe": {
        "bias": {
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "attention_bias": True,
            "num_shared_experts": 1,
            "mup_enabled": False,
            "tie_word_embeddings": True,
        }
    },
    "cohere2_moe": {
        "sigmoid": {
            "num_hidden_layers": 4,
            "layer_types": None,
            "mlp_layer_types": None,
            "first_k_dense_replace": 1,
            "prefix_dense_sliding_window_pattern": 2,
            "prefix_dense_intermediate_size": 48,
            "sliding_window_pattern": 2,
            "expert_selection_fn": "sigmoid",
            "norm_topk_prob": False,
            "num_shared_experts": 1,
            "shared_expert_combination_strategy": "sum",
            "rms_norm_eps": 1e-6,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    },
    "dots1": {
        "windowed": {"max_window_layers": 1, "attention_bias": True, "norm_topk_prob": True, "first_k_dense_replace": 0}
    },
    "ernie4_5_moe": {
        "sparse": {
            "num_hidden_layers": 4,
            "moe_layer_interval": 2,
            "moe_layer_end_index": 2,
            "moe_norm_min": 0.9,
            "moe_num_shared_experts": 0,
            "tie_word_embeddings": False,
        }
    },
    "glm4_moe": {
        "norms": {
            **rope("default", partial_rotary_factor=0.75),
            "use_qk_norm": True,
            "attention_bias": True,
            "n_group": 1,
            "first_k_dense_replace": 2,
            "norm_topk_prob": False,
            "hub": True,
        }
    },
    "gpt_oss": {
        "hub": {
            "num_hidden_layers": 4,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "head_dim": 24,
            "vocab_size": 163,
            "attention_bias": False,
            "swiglu_limit": 0.5,
            "swiglu_alpha": 1.5,
            "hub": True,
        }
    },
    "granitemoeshared": {
        "bias": {
            "attention_bias": True,
            "tie_word_embeddings": True,
            "num_local_experts": 6,
            "vocab_size": 163,
            "hub": True,
        }
    },
    "hunyuan_v1_moe": {
        "alpha_bias": {
            **rope("dynamic", alpha=50.0, factor=1.0),
            "attention_bias": True,
            "num_experts": 6,
            "hub": True,
        }
    },
    "laguna": {"elements": {"gating": "per-element", "attention_bias": True, "moe_router_logit_softcapping": 0.0}},
    "llama4_text": {
        "dense_between": {
            **rope(
                "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
            ),
            "num_hidden_layers": 4,
            "interleave_moe_layer_step": 2,
            "num_experts_per_tok": 1,
            "use_qk_norm": False,
            "floor_scale": 16,
            "attn_scale": 0.5,
            "attention_bias": True,
            "tie_word_embeddings": True,
        }
    },
    "mimo_v2_flash": {
        "unscaled": {
            "layer_types": None,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e2, "partial_rotary_factor": 1.0},
            },
            "v_head_dim": 48,
            "sliding_window_size": 6,
            "attention_value_scale": None,
            "attention_bias": True,
            "n_group": 2,
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
        }
    },
    "minimax_m2": {"partial": {"rotary_dim": 8, "head_dim": 24, "num_local_experts": 6, "tie_word_embeddings": True}},
    "mixtral": {
        "window": {"sliding_window": 8, "head_dim": 24, "vocab_size": 163, "num_local_experts": 6, "hub": True}
    },
    "olmoe": {
        "clipped": {"clip_qkv": 0.5, "norm_topk_prob": True, "attention_bias": True, "num_experts": 6, "hub": True}
    },
    "phimoe": {
        "longrope": {
            **rope(
                "longrope",
                short_factor=SHORT,
                long_factor=LONG,
                short_mscale=1.3,
                long_mscale=1.3,
                original_max_position_embeddings=128,
            ),
            "router_jitter_noise": 0.4,
            "attention_bias": True,
            "lm_head_bias": True,
            "sliding_window": 8,
        }
    },
    "qwen2_moe": {
        "windowed": {
            **WINDOWED,
            "max_window_layers": 2,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
            "qkv_bias": False,
            "shared_expert_intermediate_size": 48,
        }
    },
    "qwen3_moe": {
        "normalized": {
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
            "head_dim": 24,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "vocab_size": 163,
            "hub": True,
        },
        "sparse_step": {"norm_topk_prob": False, "decoder_sparse_step": 2, "attention_bias": True},
    },
}
