"""The options of families whose layers attend and have dense MLPs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.models.variants.common import FULL_BETWEEN, LONG, SHORT, WINDOWED, rope

OWN: Mapping[str, Mapping[str, Any]] = {
    "granite_swa": {"layer_rope_theta": [1e3, 0, 1e2]},
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
}

VARIANTS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "bloom": {"six_heads": {"n_head": 6, "hidden_size": 96, "tie_word_embeddings": False, "vocab_size": 163}},
    "cohere": {"head_norms": {"use_qk_norm": True, "attention_bias": True, "logit_scale": 0.3, "hub": True}},
    "cohere2": {"full_between": {**FULL_BETWEEN, "logit_scale": 0.3, "attention_bias": True, "head_dim": 24}},
    "cwm": {
        "llama3": {
            **rope(
                "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
            ),
            "mlp_bias": True,
        }
    },
    "exaone4": {"full_between": FULL_BETWEEN},
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
    "glm4": {"quarter": {"partial_rotary_factor": 0.25, "tie_word_embeddings": True, "hub": True}},
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
            **rope("default", partial_rotary_factor=0.5),
            "use_parallel_residual": False,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "vocab_size": 163,
            "hub": True,
        },
    },
    "hunyuan_v1_dense": {
        "alpha_bias": {**rope("dynamic", alpha=50.0, factor=1.0), "attention_bias": True, "hub": True}
    },
    "llama": {
        "llama3_tied": {
            **rope(
                "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
            ),
            "tie_word_embeddings": True,
            "head_dim": 24,
            "vocab_size": 163,
            "hub": True,
        },
        "linear_bias": {**rope("linear", factor=4.0), "attention_bias": True, "mlp_bias": True},
        "dynamic": {**rope("dynamic", factor=4.0), "max_position_embeddings": 32, "hub": True},
        "yarn": {**rope("yarn", factor=4.0, original_max_position_embeddings=32), "num_key_value_heads": 4},
        "yarn_mscale": rope(
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
    "ministral3": {
        "growing": {
            **rope(
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
    "mpt": {
        "clipped": {
            "attn_config": {"clip_qkv": 0.5, "softmax_scale": 0.4},
            "n_heads": 6,
            "d_model": 96,
            "vocab_size": 163,
            "tie_word_embeddings": False,
        },
    },
    "olmo": {"clipped": {"clip_qkv": 0.5, "attention_bias": True, "num_key_value_heads": 4, "hub": True}},
    "olmo2": {"bias_heads": {"num_key_value_heads": 4, "attention_bias": True, "vocab_size": 163, "hub": True}},
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
    "opt": {"galactica": {"enable_bias": False, "layer_norm_elementwise_affine": False, "activation_function": "gelu"}},
    "phi": {
        "qk_norm": {
            **rope("default", partial_rotary_factor=0.25),
            "qk_layernorm": True,
            "num_key_value_heads": 4,
            "vocab_size": 163,
            "hub": True,
        },
    },
    "phi3": {
        "longrope": {
            **rope("longrope", short_factor=SHORT, long_factor=LONG),
            "original_max_position_embeddings": 32,
        },
        "longrope_partial": {
            **rope("longrope", short_factor=SHORT[:6], long_factor=LONG[:6], partial_rotary_factor=0.75),
            "original_max_position_embeddings": 32,
            "tie_word_embeddings": True,
            "vocab_size": 163,
            "hub": True,
        },
        "partial_window": {**rope("default", partial_rotary_factor=0.5), "sliding_window": 8},
    },
    "qwen2": {"windowed_tied": {**WINDOWED, "tie_word_embeddings": True, "vocab_size": 163, "hub": True}},
    "qwen3": {
        "windowed_bias": {**WINDOWED, "attention_bias": True, "head_dim": 24},
        "tied": {"tie_word_embeddings": True, "head_dim": 24, "vocab_size": 163, "hub": True},
    },
    "stablelm": {
        "parallel": {
            **rope("default", partial_rotary_factor=0.5),
            "use_qkv_bias": True,
            "qk_layernorm": True,
            "use_parallel_residual": True,
            "tie_word_embeddings": True,
            "vocab_size": 163,
            "hub": True,
        },
    },
    "starcoder2": {"window": {"sliding_window": 8, "use_bias": False, "tie_word_embeddings": False, "hub": True}},
    "vaultgemma": {
        "softcaps": {"attn_logit_softcapping": 4.0, "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 20}
    },
}
