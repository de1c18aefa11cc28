"""The options of each family that its default configuration leaves out, as fields on top of `tiny.SIZES`.

`hub` writes config.json in the style of transformers 4. Rotary lengths are small enough that the tests' 84 tokens
cross them. Soft caps are small so that tanh bends; windows are smaller than the prompts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SHORT = [1.0, 1.05, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0]
_LONG = [1.0, 1.3, 1.7, 2.2, 3.0, 4.5, 7.0, 12.0]
_WINDOWED = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}


def _rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **parameters}}


_FULL_BETWEEN = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}

_SCANS = {"state_size": 8, "time_step_floor": 0.5}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 8}


_LATENT = {"num_key_value_heads": 4, "head_dim": 8}  # as many as of queries; what is rotated
_YARN = {"factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16, "mscale": 0.7, "mscale_all_dim": 1.2}
_HYBRID = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}

# As files of these families call what others' fields are.
_KIMI = {
    **_HYBRID,
    "num_key_value_heads": 4,
    "linear_num_heads": 4,
    "linear_head_dim": 16,
    "num_expert_group": 2,
    "num_experts_per_token": 2,
    "num_shared_experts": 2,
    "model_max_length": 128,
}

# Fields of all cases of a family, beside `tiny.SIZES`.
OWN: Mapping[str, Mapping[str, Any]] = {
    "bailing_hybrid": {**_KIMI, "topk_group": 1, "first_k_dense_replace": 1, "head_dim": 16},
    "cohere2_moe": {**_FULL_BETWEEN, "mlp_layer_types": ["sparse", "dense", "sparse"], "num_shared_experts": 2},
    "deepseek_v2": {**_LATENT, "n_group": 1},
    "deepseek_v3": {**_LATENT, "topk_group": 1, "first_k_dense_replace": 1},
    "glm4_moe_lite": _LATENT,
    "minicpm3": {**_LATENT, "dim_model_base": 32, "q_lora_rank": 24},
    "mistral4": {**_LATENT, "head_dim": 24, "first_k_dense_replace": 1},
    "youtu": _LATENT,
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "falcon_h1": {
        **_MAMBA,
        "mamba_d_ssm": 128,
        "key_multiplier": 0.4,
        "lm_head_multiplier": 0.5,
        "attention_in_multiplier": 1.1,
        "attention_out_multiplier": 0.9,
        "ssm_in_multiplier": 1.2,
        "ssm_out_multiplier": 0.7,
        "mlp_multipliers": [0.9, 0.6],
        "ssm_multipliers": [0.6, 0.7, 0.8, 1.5, 0.9],
    },
    "falcon_mamba": _SCANS,
    "gemma3n_text": {
        "num_hidden_layers": 6,
        "layer_types": [f"{kind}_attention" for kind in ("sliding", "full", "sliding", "full", "sliding", "full")],
        "num_kv_shared_layers": 2,
        "intermediate_size": [96, 48, 96, 96, 96, 64],
        "vocab_size_per_layer_input": 100,
        "hidden_size_per_layer_input": 8,
        "altup_num_inputs": 3,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.8, 0.5, 0.0, 0.0, 0.9, 0.0],
        "final_logit_softcapping": 4.0,
    },
    "gemma4_text": {
        "num_hidden_layers": 6,
        "layer_types": [f"{kind}_attention" for kind in ("sliding", "full", "sliding", "sliding", "sliding", "full")],
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 160,
        "final_logit_softcapping": 4.0,
        "per_layer_config": {str(i): {"head_dim": 32} for i in (1, 5)},
    },
    "granitemoehybrid": {**_MAMBA, "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    "laguna": {
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "num_attention_heads_per_layer": [4, 8, 2],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "moe_routed_scaling_factor": 2.5,
        "moe_router_logit_softcapping": 0.5,
    },
    "kimi_linear": _KIMI,
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    **dict.fromkeys(("olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"), _HYBRID),
    "llama4_text": {"num_experts_per_tok": 1},
    "jamba": {"attn_layer_period": 3, "attn_layer_offset": 2, "mamba_d_state": 8, "mamba_dt_rank": 5},
    "mamba": _SCANS,
    "mamba2": {
        "state_size": 16,
        "num_heads": 8,
        "head_dim": 16,
        "n_groups": 2,
        "chunk_size": 8,
        "time_step_min": 1e-12,
        "time_step_floor": 0.5,
    },
    "lfm3": {"layer_types": ["sliding_attention", "conv", "full_attention"]},
    "mimo_v2_flash": {
        **_FULL_BETWEEN,
        "head_dim": 48,
        "v_head_dim": 32,
        "n_group": 1,
        "num_key_value_heads": 1,
        "n_routed_experts": 4,
    },
    "minimax": {**_HYBRID, "block_size": 8, "intermediate_size": 32},
    "nemotron_h": {
        "layers_block_type": ["mamba", "moe", "attention", "mlp"],
        "ssm_state_size": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "chunk_size": 8,
        "moe_shared_expert_intermediate_size": 48,
        "time_step_min": 1e-12,  # a bound of transformers' prompts alone
        "time_step_floor": 0.5,  # at which dt starts
    },
    "rwkv7": {"decay_low_rank_dim": 8, "a_low_rank_dim": 12, "v_low_rank_dim": 6, "gate_low_rank_dim": 20},
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid", "hybrid"],
        "num_mem_blocks": 2,
        "mamba_d_state": 16,
        "mamba_ngroups": 2,
        "chunk_size": 8,
        "adapter_rank": 8,
        "use_mem_rope": True,
        "time_step_min": 1e-12,
        "time_step_floor": 0.5,
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
    "bailing_hybrid": {
        "unbounded": {
            "layer_types": None,
            "layer_group_size": 2,
            "kda_safe_gate": False,
            "short_conv_kernel_size": 3,
            "first_k_dense_replace": 0,
            "attention_bias": True,
        }
    },
    "bamba": {
        "biases": {
            "mamba_n_groups": 2,
            "mamba_d_conv": 3,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        }
    },
    "cohere": {"head_norms": {"use_qk_norm": True, "attention_bias": True, "logit_scale": 0.3, "hub": True}},
    "cohere2": {"full_between": {**_FULL_BETWEEN, "logit_scale": 0.3, "attention_bias": True, "head_dim": 24}},
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
    "cwm": {
        "llama3": {
            **_rope(
                "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
            ),
            "mlp_bias": True,
        }
    },
    "deepseek_v2": {
        "grouped": {
            **_rope("yarn", **_YARN),
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
            **_rope("yarn", **_YARN),
            "rope_interleave": False,
            "norm_topk_prob": False,
            "n_group": 1,
            "q_lora_rank": None,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "hub": True,
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
    "exaone4": {"full_between": _FULL_BETWEEN},
    "glm4": {"quarter": {"partial_rotary_factor": 0.25, "tie_word_embeddings": True, "hub": True}},
    "glm4_moe_lite": {
        "sparse": {"mlp_layer_types": ["sparse", "dense", "sparse"], "n_group": 1, "rope_interleave": False},
    },
    "glm4_moe": {
        "norms": {
            **_rope("default", partial_rotary_factor=0.75),
            "use_qk_norm": True,
            "attention_bias": True,
            "n_group": 1,
            "first_k_dense_replace": 2,
            "norm_topk_prob": False,
            "hub": True,
        }
    },
    "granitemoehybrid": {
        "groups": {
            "mamba_n_heads": 16,
            "mamba_d_head": 8,
            "mamba_n_groups": 2,
            "mamba_d_conv": 3,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "tie_word_embeddings": True,
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
    "hunyuan_v1_dense": {
        "alpha_bias": {**_rope("dynamic", alpha=50.0, factor=1.0), "attention_bias": True, "hub": True}
    },
    "hunyuan_v1_moe": {
        "alpha_bias": {
            **_rope("dynamic", alpha=50.0, factor=1.0),
            "attention_bias": True,
            "num_experts": 6,
            "hub": True,
        }
    },
    "kimi_linear": {
        "listed": {
            "layer_types": None,
            "linear_attn_config": {
                "num_heads": 3,
                "head_dim": 24,
                "short_conv_kernel_size": 3,
                "full_attn_layers": [1],
                "kda_layers": [2, 3],
            },
            "mlp_layer_types": ["sparse", "sparse", "dense"],
            "q_lora_rank": None,
            "num_expert_group": 1,
            "moe_renormalize": False,
            "attention_bias": True,
        }
    },
    "lfm2_moe": {
        "no_bias": {
            "layer_types": ["full_attention", "conv", "conv"],
            "num_dense_layers": 0,
            "use_expert_bias": False,
            "norm_topk_prob": False,
            "conv_bias": True,
            "tie_word_embeddings": False,
        },
    },
    "llama": {
        "llama3_tied": {
            **_rope(
                "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
            ),
            "tie_word_embeddings": True,
            "head_dim": 24,
            "vocab_size": 163,
            "hub": True,
        },
        "linear_bias": {**_rope("linear", factor=4.0), "attention_bias": True, "mlp_bias": True},
        "dynamic": {**_rope("dynamic", factor=4.0), "max_position_embeddings": 32, "hub": True},
        "yarn": {**_rope("yarn", factor=4.0, original_max_position_embeddings=32), "num_key_value_heads": 4},
        "yarn_mscale": _rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=32,
            beta_fast=8.0,
            beta_slow=0.5,
            mscale=1.0,
            mscale_all_dim=0.5,
            truncate=False,
        ),
    },
    "lfm3": {
        "plain": {
            "layer_types": None,
            "rope_parameters": {
                "full_attention": {"rope_type": "proportional", "rope_theta": 1e2, "partial_rotary_factor": 0.25},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            },
            "num_hidden_layers": 5,
            "conv_bias": True,
            "conv_L_cache": 3,
            "use_sandwich_norm": False,
            "use_attention_gate": False,
            "attention_bias": True,
            "tie_word_embeddings": False,
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
    "minimax": {
        "factors": {
            "layer_types": None,
            "full_attn_alpha_factor": 1.3,
            "full_attn_beta_factor": 0.7,
            "linear_attn_alpha_factor": 1.2,
            "linear_attn_beta_factor": 1.9,
            "mlp_alpha_factor": 0.8,
            "mlp_beta_factor": 1.5,
            "rotary_dim": 8,
            "sliding_window": 8,
            "hidden_act": "gelu",
            "tie_word_embeddings": True,
        }
    },
    "minimax_m2": {"partial": {"rotary_dim": 8, "head_dim": 24, "num_local_experts": 6, "tie_word_embeddings": True}},
    "mamba": {
        "biases": {
            "use_bias": True,
            "use_conv_bias": False,
            "conv_kernel": 3,
            "time_step_rank": 6,
            "tie_word_embeddings": False,
        }
    },
    "minicpm3": {
        "plain": {
            **_rope("longrope", short_factor=_SHORT[:4], long_factor=_LONG[:4], original_max_position_embeddings=96),
            "scale_depth": None,
            "scale_emb": 3,
            "dim_model_base": None,
            "q_lora_rank": None,
            "qk_nope_head_dim": 24,
            "v_head_dim": 16,
            "tie_word_embeddings": False,
        }
    },
    "mamba2": {
        "biases": {
            "n_groups": 1,
            "use_bias": True,
            "use_conv_bias": False,
            "conv_kernel": 3,
            "tie_word_embeddings": True,
        }
    },
    "ministral3": {
        "growing": {
            **_rope(
                "yarn",
                factor=4.0,
                original_max_position_embeddings=16,
                mscale=1.0,
                mscale_all_dim=1.0,
                llama_4_scaling_beta=0.3,
            ),
            "sliding_window": 8,
        }
    },
    "mistral": {"no_window": {"sliding_window": None, "head_dim": 24, "vocab_size": 163, "hub": True}},
    "olmo_hybrid": {
        "no_rope": {
            **_rope("default", rope_theta=None),
            "layer_types": None,
            "linear_allow_neg_eigval": False,
            "attention_bias": True,
        },
    },
    "olmoe": {
        "clipped": {"clip_qkv": 0.5, "norm_topk_prob": True, "attention_bias": True, "num_experts": 6, "hub": True}
    },
    "qwen2": {"windowed_tied": {**_WINDOWED, "tie_word_embeddings": True, "vocab_size": 163, "hub": True}},
    "qwen2_moe": {
        "windowed": {
            **_WINDOWED,
            "max_window_layers": 2,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
            "qkv_bias": False,
            "shared_expert_intermediate_size": 48,
        }
    },
    "qwen3": {
        "windowed_bias": {**_WINDOWED, "attention_bias": True, "head_dim": 24},
        "tied": {"tie_word_embeddings": True, "head_dim": 24, "vocab_size": 163, "hub": True},
    },
    "qwen3_5_text": {
        "every_fourth": {
            **_rope("default", partial_rotary_factor=0.5, mrope_section=[2, 1, 1], mrope_interleaved=True),
            "num_hidden_layers": 4,
            "layer_types": None,
            "linear_num_value_heads": 2,
            "linear_conv_kernel_dim": 3,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "vocab_size": 163,
            "hub": True,
        },
    },
    "qwen3_next": {"dense_between": {"mlp_only_layers": [1], "norm_topk_prob": False, "head_dim": 24}},
    "opt": {"galactica": {"enable_bias": False, "layer_norm_elementwise_affine": False, "activation_function": "gelu"}},
    "llama4_text": {
        "dense_between": {
            **_rope(
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
    "phi": {
        "qk_norm": {
            **_rope("default", partial_rotary_factor=0.25),
            "qk_layernorm": True,
            "num_key_value_heads": 4,
            "vocab_size": 163,
            "hub": True,
        },
    },
    "phi3": {
        "longrope": {
            **_rope("longrope", short_factor=_SHORT, long_factor=_LONG),
            "original_max_position_embeddings": 32,
        },
        "longrope_partial": {
            **_rope("longrope", short_factor=_SHORT[:6], long_factor=_LONG[:6], partial_rotary_factor=0.75),
            "original_max_position_embeddings": 32,
            "tie_word_embeddings": True,
            "vocab_size": 163,
            "hub": True,
        },
        "partial_window": {**_rope("default", partial_rotary_factor=0.5), "sliding_window": 8},
    },
    "phimoe": {
        "longrope": {
            **_rope(
                "longrope",
                short_factor=_SHORT,
                long_factor=_LONG,
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
    "bloom": {"six_heads": {"n_head": 6, "hidden_size": 96, "tie_word_embeddings": False, "vocab_size": 163}},
    "falcon": {
        "new": {"new_decoder_architecture": True, "bias": True, "tie_word_embeddings": False, "activation": "relu"},
        "sequential": {
            "parallel_attn": False,
            "multi_query": False,
            "num_kv_heads": 4,
            "ffn_hidden_size": None,
            "hub": True,
        },
    },
    "falcon_h1": {
        "norms": {
            "mamba_n_groups": 2,
            "mamba_rms_norm": True,
            "projectors_bias": True,
            "mamba_d_ssm": 96,
            "mamba_n_heads": 6,
            "tie_word_embeddings": True,
        },
        "gated_norms": {
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "attention_bias": True,
            "mlp_bias": True,
        },
    },
    "gemma": {"legacy": {"hidden_act": "gelu", "attention_bias": True, "tie_word_embeddings": False, "head_dim": 24}},
    "gemma2": {
        "softcaps": {
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 5.0,
            "query_pre_attn_scalar": 20,
            "head_dim": 24,
            "vocab_size": 163,
            "num_hidden_layers": 4,
            "hub": True,
        },
        "no_softcaps": {"attn_logit_softcapping": None, "final_logit_softcapping": None, "query_pre_attn_scalar": 16},
    },
    "gemma3_text": {
        "two_thetas": {
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 100000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
            "sliding_window_pattern": 2,
            "num_hidden_layers": 4,
            "query_pre_attn_scalar": 20,
            "head_dim": 24,
            "vocab_size": 163,
        },
        "linear": {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 100000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
            "sliding_window_pattern": 3,
            "query_pre_attn_scalar": 16,
            "final_logit_softcapping": 5.0,
            "hub": True,
        },
    },
    "gemma3n_text": {
        "active": {
            "altup_active_idx": 1,
            "altup_correct_scale": False,
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "intermediate_size": 96,
            "activation_sparsity_pattern": None,
            "num_kv_shared_layers": 0,
            "attention_bias": True,
            "num_key_value_heads": 1,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        }
    },
    "gemma4_text": {
        "experts": {
            "num_hidden_layers": 4,
            "layer_types": [f"{kind}_attention" for kind in ("sliding", "full", "sliding", "full")],
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            "use_bidirectional_attention": "vision",
            "attention_k_eq_v": True,
            "attention_bias": True,
            "per_layer_config": {str(i): {"head_dim": 24, "num_key_value_heads": 1} for i in (1, 3)},
            "enable_moe_block": True,
            "top_k_experts": 2,
            "final_logit_softcapping": None,
            "rope_parameters": {
                "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e3},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        }
    },
    "gpt2": {
        "scales": {
            "scale_attn_by_inverse_layer_idx": True,
            "n_inner": 96,
            "tie_word_embeddings": False,
            "vocab_size": 163,
            "activation_function": "relu",
        },
    },
    "gpt_bigcode": {"multi_head": {"multi_query": False, "scale_attn_weights": False, "tie_word_embeddings": False}},
    "gpt_neox": {
        "sequential": {
            **_rope("default", partial_rotary_factor=0.5),
            "use_parallel_residual": False,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "vocab_size": 163,
            "hub": True,
        },
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
    "laguna": {"elements": {"gating": "per-element", "attention_bias": True, "moe_router_logit_softcapping": 0.0}},
    "lfm2": {
        "biases": {
            "full_attn_idxs": [0, 3],
            "num_hidden_layers": 4,
            "conv_L_cache": 4,
            "num_key_value_heads": 4,
            "conv_bias": True,
            "block_ffn_dim_multiplier": 1.3,
            "tie_word_embeddings": False,
            "head_dim": 24,
            "vocab_size": 163,
            "hub": True,
        },
        "no_adjustment": {"layer_types": ["conv", "conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    },
    "mpt": {
        "clipped": {
            "attn_config": {"clip_qkv": 0.5, "softmax_scale": 0.4},
            "n_heads": 6,
            "d_model": 96,
            "vocab_size": 163,
            "tie_word_embeddings": False,
        },
    },
    "nemotron_h": {
        "biases": {
            "layers_block_type": ["attention", "mamba", "moe"],
            "use_bias": True,
            "use_conv_bias": False,
            "conv_kernel": 3,
            "n_groups": 4,
            "n_group": 1,
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
        }
    },
    "olmo2": {"bias_heads": {"num_key_value_heads": 4, "attention_bias": True, "vocab_size": 163, "hub": True}},
    "olmo": {"clipped": {"clip_qkv": 0.5, "attention_bias": True, "num_key_value_heads": 4, "hub": True}},
    "olmo3": {
        "yarn": {
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 32,
                    "rope_theta": 1e4,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "attention_bias": True,
        }
    },
    "mistral4": {
        "grown": {
            **_rope("yarn", **_YARN, llama_4_scaling_beta=0.7),
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
            "q_lora_rank": None,
            "tie_word_embeddings": True,
        }
    },
    "mixtral": {
        "window": {"sliding_window": 8, "head_dim": 24, "vocab_size": 163, "num_local_experts": 6, "hub": True}
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
    "rwkv7": {
        "plain": {
            "norm_first": False,
            "norm_bias": False,
            "head_dim": 32,
            "intermediate_size": None,
            "tie_word_embeddings": True,
        }
    },
    "vaultgemma": {
        "softcaps": {"attn_logit_softcapping": 4.0, "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 20}
    },
    "stablelm": {
        "parallel": {
            **_rope("default", partial_rotary_factor=0.5),
            "use_qkv_bias": True,
            "qk_layernorm": True,
            "use_parallel_residual": True,
            "tie_word_embeddings": True,
            "vocab_size": 163,
            "hub": True,
        },
    },
    "starcoder2": {"window": {"sliding_window": 8, "use_bias": False, "tie_word_embeddings": False, "hub": True}},
    "zamba2": {
        "adapters": {
            "num_hidden_layers": 3,
            "layers_block_type": ["hybrid", "linear_attention", "hybrid"],
            "num_mem_blocks": 1,
            "use_shared_attention_adapter": True,
            "num_key_value_heads": 4,
            "use_mem_rope": False,
            "add_bias_linear": True,
            "mamba_ngroups": 1,
            "mamba_d_conv": 3,
            "hidden_act": "gelu_pytorch_tanh",
            "intermediate_size": None,
        },
    },
}
