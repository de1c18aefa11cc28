"""What a checkpoint's config.json is in the metadata of a GGUF file, as llama.cpp's converter writes it."""

from __future__ import annotations

from importlib import import_module
from statistics import NormalDist
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from mlcpipe.checkpoint import TensorInfo
from mlcpipe.nn.base_config import Defaults


def defaults_of(config: dict[str, Any]) -> Defaults:
    """What a family's config.json need not say, and what it calls the fields of Llama's."""
    found: Defaults = getattr(import_module(f"mlcpipe.models.{config['model_type']}"), "DEFAULTS", Defaults())
    return found


def with_usual_names(config: dict[str, Any]) -> dict[str, Any]:
    """A config.json with Llama's names of the fields that all families have."""
    defaults = defaults_of(config)
    found = config | {usual: config[own] for usual, own in defaults.names.items() if config.get(own) is not None}
    width = defaults.expansion * found["hidden_size"]
    listed = {"num_hidden_layers": len(found.get("layers_block_type", ()))}
    return {"intermediate_size": width, "max_position_embeddings": defaults.positions} | listed | found


def add_sizes(writer: gguf.GGUFWriter, config: dict[str, Any], gate: TensorInfo | None) -> None:
    """`gate`: the matrix of an MLP whose width is not in config.json."""
    heads, kind = config.get("num_attention_heads", 1), config["model_type"]
    head_dim = _head_dim(config)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    drafts = config.get("num_nextn_predict_layers") or 0
    writer.add_block_count(config["num_hidden_layers"] + drafts)
    if drafts:
        writer.add_nextn_predict_layers(drafts)
    names = ("prefix_dense_intermediate_size", "intermediate_size_mlp", "intermediate_size")
    width = next((config[name] for name in names if config.get(name)), 0)
    kinds = config.get("layers_block_type")
    inner = config.get("moe_intermediate_size") if "moe" in (kinds or ()) else width
    widths = [inner * (one in ("moe", "mlp")) for one in kinds] if kinds else width if gate is None else gate.shape[0]
    writer.add_feed_forward_length(widths)
    writer.add_head_count(config.get("num_attention_heads_per_layer") or heads * ("mamba" not in kind))
    kv_heads = config.get("num_key_value_heads", heads)
    types = config.get("layer_types") or config.get("layers_block_type") or ()
    if period := config.get("attn_layer_period"):
        at = config["attn_layer_offset"]
        types = ["attention" if i % period == at else "mamba" for i in range(config["num_hidden_layers"])]
    if attending := config.get("attn_layer_indices"):
        types = ["attention" if i in attending else "mamba" for i in range(config["num_hidden_layers"])]
        writer.add_rope_scaling_finetuned(True)
    if kind == "falcon_mamba":
        writer.add_ssm_dt_b_c_rms(True)
    attend = [one not in ("conv", "linear_attention", "mamba", "mlp", "moe") for one in types]
    one = all(attend) or kind.startswith(("qwen3_5", "qwen3_next"))
    writer.add_head_count_kv(kv_heads if one else [kv_heads * one for one in attend])
    if (sizes := scan_sizes(config))["state_size"]:
        for key, size in sizes.items():
            writer.add_uint32(f"{writer.arch}.ssm.{key}", size)
    layer_norms = defaults_of(config).norm.kind == "layer"
    eps = 1e-5 if kind == "olmo" else config["rms_norm_eps"]
    (writer.add_layer_norm_eps if layer_norms else writer.add_layer_norm_rms_eps)(eps)
    if kind == "mpt":
        writer.add_max_alibi_bias(config["attn_config"]["alibi_bias_max"])
        writer.add_clamp_kqv(config["attn_config"]["clip_qkv"] or 0.0)
    if config.get("use_parallel_residual") is not None:
        writer.add_parallel_residual(config["use_parallel_residual"])
    if rank := config.get("kv_lora_rank"):
        _add_latent_sizes(writer, config, rank)
    else:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if count := expert_count(config):
        writer.add_expert_count(count)
        used = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts")
        writer.add_expert_used_count(next(config[name] for name in used if config.get(name)))
        if kind not in ("mixtral", "granitemoe", "granitemoeshared", "granitemoehybrid", "jamba", "olmoe"):
            writer.add_expert_feed_forward_length(config.get("moe_intermediate_size", config["intermediate_size"]))
    sigmoid = ("deepseek_v3", "glm4_moe", "dots1", "minimax_m2", "lfm2_moe", "afmoe", "laguna", "exaone_moe", "hy_v3")
    score = "sigmoid" if kind in sigmoid else ""
    if score := config.get("expert_selection_fn", score):
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType[score.upper()])
    if kind in ("cohere2_moe", "laguna"):
        writer.add_leading_dense_block_count(config["mlp_layer_types"].count("dense"))
    if "routed_scaling_factor" in config or kind in ("cohere2_moe", "hy_v3"):
        writer.add_expert_weights_norm(config.get("norm_topk_prob", True))
    if kind == "hy_v3":
        config = dict(config)
        writer.add_expert_shared_feed_forward_length(config.pop("num_shared_experts") * config["moe_intermediate_size"])
    if kind in (
        "gemma2",
        "gemma3_text",
        "phi3",
        "mistral",
        "mixtral",
        "gpt_oss",
        "cohere2",
        "cohere2_moe",
        "exaone4",
        "exaone_moe",
        "mellum",
        "muse_glimmer_text",
        "olmo3",
        "starcoder2",
        "afmoe",
        "laguna",
    ):
        writer.add_sliding_window(config.get("sliding_window") or 0)
    if kind in ("gemma3n_text", "gemma4_text"):
        _add_gemma4(writer, config)
    if kind in ("exaone4", "exaone_moe", "mellum", "muse_glimmer_text", "olmo3", "cohere2_moe"):
        writer.add_sliding_window_pattern([one == "sliding_attention" for one in types])
    for field, add in (
        ("attn_logit_softcapping", writer.add_attn_logit_softcapping),
        ("final_logit_softcapping", writer.add_final_logit_softcapping),
        ("attention_multiplier", writer.add_attention_scale),
        ("embedding_multiplier", writer.add_embedding_scale),
        ("residual_multiplier", writer.add_residual_scale),
        ("logits_scaling", writer.add_logit_scale),
        ("logit_scale", writer.add_logit_scale),
        ("output_multiplier", writer.add_logit_scale),
        ("clip_qkv", writer.add_clamp_kqv),
        ("conv_L_cache", writer.add_shortconv_l_cache),
        ("shared_expert_intermediate_size", writer.add_expert_shared_feed_forward_length),
        ("shared_intermediate_size", writer.add_expert_shared_feed_forward_length),
        ("moe_shared_expert_intermediate_size", writer.add_expert_shared_feed_forward_length),
        *(
            (name, writer.add_expert_shared_count)
            for name in ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
        ),
        *(
            (name, writer.add_leading_dense_block_count)
            for name in ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
        ),
        *(
            (name, writer.add_expert_weights_scale)
            for name in ("routed_scaling_factor", "route_scale", "router_scaling_factor", "moe_routed_scaling_factor")
        ),
        ("n_group", writer.add_expert_group_count),
        ("topk_group", writer.add_expert_group_used_count),
        ("moe_layer_interval", writer.add_interleave_moe_layer_step),
        ("interleave_moe_layer_step", writer.add_interleave_moe_layer_step),
    ):
        if config.get(field) is not None:
            add(config[field])


def _add_gemma4(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Of Gemma 3n and 4; sizes by layer replace those that were added before."""
    kind, slides = config["model_type"], [one == "sliding_attention" for one in config["layer_types"]]
    shared, count, width = config["num_kv_shared_layers"], len(slides), config["intermediate_size"]
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern(slides)
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    if kind == "gemma3n_text":
        quantiles = [NormalDist().inv_cdf(one) if one else -np.inf for one in config["activation_sparsity_pattern"]]
        writer.add_activation_sparsity_scale(quantiles)
        writer.add_altup_num_inputs(config["altup_num_inputs"])
        writer.add_altup_active_idx(config["altup_active_idx"])
        return
    full = config["per_layer_config"][str(slides.index(False))]
    heads = [
        config["num_key_value_heads"] if one else full.get("num_key_value_heads", config["num_key_value_heads"])
        for one in slides
    ]
    wide = [width * (1 + (config["use_double_wide_mlp"] and i >= count - shared)) for i in range(count)]
    for key in ("attention.head_count_kv", "feed_forward_length", "attention.key_length", "attention.value_length"):
        del writer.kv_data[0][f"gemma4.{key}"]
    writer.add_head_count_kv(heads)
    writer.add_feed_forward_length(wide)
    writer.add_key_length(full["head_dim"])
    writer.add_value_length(full["head_dim"])
    writer.add_key_length_swa(config["head_dim"])
    writer.add_value_length_swa(config["head_dim"])


def _head_dim(config: dict[str, Any]) -> int:
    """Dimensions of a head, or of what rope rotates in latent attention."""
    heads = config.get("num_attention_heads", 1)
    return int(config.get("qk_rope_head_dim") or config.get("head_dim") or config["hidden_size"] // heads)


def _add_latent_sizes(writer: gguf.GGUFWriter, config: dict[str, Any], rank: int) -> None:
    """Those of cached keys and values beside those of heads; MiniCPM 3's conversion knows only the latter."""
    whole = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    if config["q_lora_rank"] is not None:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(rank)
    if config["model_type"] == "minicpm3":
        writer.add_key_length(whole)
        return
    writer.add_key_length(rank + config["qk_rope_head_dim"])
    writer.add_value_length(rank)
    writer.add_key_length_mla(whole)
    writer.add_value_length_mla(config["v_head_dim"])


def scan_sizes(config: dict[str, Any]) -> dict[str, int]:
    """What Mamba-2 blocks are made of, by llama.cpp's names, from the fields that families have."""
    fields = {
        "time_step_rank": (
            "linear_num_value_heads",
            "mamba_n_heads",
            "mamba_num_heads",
            "num_heads",
            "mamba_dt_rank",
            "time_step_rank",
        ),
        "state_size": ("linear_key_head_dim", "mamba_d_state", "ssm_state_size", "state_size"),
        "group_count": ("linear_num_key_heads", "mamba_n_groups", "n_groups"),
        "conv_kernel": ("linear_conv_kernel_dim", "mamba_d_conv", "conv_kernel"),
    }
    found = {key: next((config[name] for name in names if name in config), 0) for key, names in fields.items()}
    names = ("linear_value_head_dim", "mamba_d_head", "mamba_head_dim", "head_dim")
    head_dim = next((config[name] for name in names if name in config), 0)
    inner = (
        config["mamba_expand"] * config["hidden_size"] if "mamba_dt_rank" in config else config.get("intermediate_size")
    )
    return {**found, "inner_size": found["time_step_rank"] * head_dim if found["group_count"] else inner}


def expert_count(config: dict[str, Any]) -> int:
    """The number of a layer's experts, 0 in models without."""
    names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    stated = [config[name] for name in names if config.get(name) and config.get("enable_moe_block", True)]
    return stated[0] if stated else 0


def add_rope(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    table = config.get("rope_parameters") or config.get("rope_scaling") or {}
    local = table.get("sliding_attention")
    table = table.get("full_attention", table)
    theta = table.get("rope_theta", config.get("rope_theta", 10000.0))
    head_dim = _head_dim(config)
    partial = config.get("partial_rotary_factor", table.get("partial_rotary_factor", 1.0))
    rotated = head_dim if config.get("kv_lora_rank") else int(head_dim * partial)
    kind = table.get("rope_type", table.get("type", "default"))
    if kind == "proportional":
        head_dim = rotated = config["per_layer_config"][str(config["layer_types"].index("full_attention"))]["head_dim"]
        divisors = np.where(np.arange(head_dim // 2) < int(head_dim * partial / 2), 1, 1e30)
        writer.add_tensor("rope_freqs.weight", divisors.astype(np.float32))
    writer.add_rope_freq_base(theta)
    writer.add_rope_dimension_count(rotated)
    if local is not None:
        writer.add_rope_freq_base_swa(local["rope_theta"])
    if config["model_type"] == "laguna":
        rotated = int(head_dim * local["partial_rotary_factor"])
        writer.add_uint32(f"{writer.arch}.rope.dimension_count_swa", rotated)
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(table["factor"])
    if config.get("kv_lora_rank") and table.get("mscale_all_dim"):
        writer.add_rope_scaling_yarn_log_mul(0.1 * table["mscale_all_dim"])
    if (beta := table.get("llama_4_scaling_beta")) is not None:
        writer.add_attn_temperature_scale(beta)
        if not config.get("kv_lora_rank"):
            writer.add_rope_scaling_yarn_log_mul(table["mscale_all_dim"])
    if original := config.get("original_max_position_embeddings", table.get("original_max_position_embeddings")):
        writer.add_rope_scaling_orig_ctx_len(original)
    if kind == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(table, theta, head_dim))
    if kind == "longrope":
        scale = config["max_position_embeddings"] / original
        writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + np.log(scale) / np.log(original))))
        for length in ("long", "short"):
            writer.add_tensor(f"rope_factors_{length}.weight", np.array(table[f"{length}_factor"], np.float32))


def _llama3_factors(table: dict[str, Any], theta: float, dim: int) -> NDArray[np.float32]:
    """As llama.cpp's conversion computes them."""
    low, high, factor = table["low_freq_factor"], table["high_freq_factor"], table["factor"]
    original = table["original_max_position_embeddings"]
    factors = []
    for wavelength in 2 * np.pi * theta ** (np.arange(0, dim, 2, dtype=np.float32) / dim):
        smooth = min(max((original / wavelength - low) / (high - low), 0), 1)
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)
