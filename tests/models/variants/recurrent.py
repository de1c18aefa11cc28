"""The options of families with recurrent layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.models.variants.common import rope

SCANS = {"state_size": 8, "time_step_floor": 0.5}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 8}
HYBRID = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}

# As files of these families call what others' fields are.
KIMI = {
    **HYBRID,
    "num_key_value_heads": 4,
    "linear_num_heads": 4,
    "linear_head_dim": 16,
    "num_expert_group": 2,
    "num_experts_per_token": 2,
    "num_shared_experts": 2,
    "model_max_length": 128,
}

OWN: Mapping[str, Mapping[str, Any]] = {
    "bailing_hybrid": {**KIMI, "topk_group": 1, "first_k_dense_replace": 1, "head_dim": 16},
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "falcon_h1": {
        **MAMBA,
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
    "falcon_mamba": SCANS,
    "granitemoehybrid": {**MAMBA, "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    "jamba": {"attn_layer_period": 3, "attn_layer_offset": 2, "mamba_d_state": 8, "mamba_dt_rank": 5},
    "kimi_linear": KIMI,
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "lfm3": {"layer_types": ["sliding_attention", "conv", "full_attention"]},
    "mamba": SCANS,
    "mamba2": {
        "state_size": 16,
        "num_heads": 8,
        "head_dim": 16,
        "n_groups": 2,
        "chunk_size": 8,
        "time_step_min": 1e-12,
        "time_step_floor": 0.5,
    },
    "minimax": {**HYBRID, "block_size": 8, "intermediate_size": 32},
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
    **dict.fromkeys(("olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"), HYBRID),
}

VARIANTS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
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
    "mamba": {
        "biases": {
            "use_bias": True,
            "use_conv_bias": False,
            "conv_kernel": 3,
            "time_step_rank": 6,
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
    "olmo_hybrid": {
        "no_rope": {
            **rope("default", rope_theta=None),
            "layer_types": None,
            "linear_allow_neg_eigval": False,
            "attention_bias": True,
        },
    },
    "qwen3_5_text": {
        "every_fourth": {
            **rope("default", partial_rotary_factor=0.5, mrope_section=[2, 1, 1], mrope_interleaved=True),
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
    "rwkv7": {
        "plain": {
            "norm_first": False,
            "norm_bias": False,
            "head_dim": 32,
            "intermediate_size": None,
            "tie_word_embeddings": True,
        }
    },
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
