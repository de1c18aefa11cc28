"""GGUF files: built byte by byte, so that each rule can be broken alone, or from a checkpoint by the `gguf` package."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from statistics import NormalDist
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from mlcpipe.checkpoint import Checkpoint, TensorInfo
from mlcpipe.models import gguf_families
from mlcpipe.nn.base_config import Defaults
from mlcpipe.nn.gguf import GgufFamily

F32 = gguf.GGMLQuantizationType.F32
U32, STRING, ARRAY = 4, 8, 9
ARCHITECTURES = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def entry(name: str | bytes, extents: Sequence[int], offset: int, kind: int = 0) -> bytes:
    """A tensor of the list; `extents` have the fastest first."""
    shape = struct.pack(f"<I{len(extents)}Q", len(extents), *extents)
    return text(name) + shape + struct.pack("<IQ", kind, offset)


def raw_file(
    path: Path,
    pairs: Sequence[bytes] = (),
    entries: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    counts: tuple[int, int] | None = None,
    alignment: int = 32,
) -> Path:
    """A file with exactly these parts; `counts` overrides the numbers of tensors and pairs."""
    tensors, keys = counts or (len(entries), len(pairs))
    head = b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + b"".join((*pairs, *entries))
    path.write_bytes(head + b"\0" * (-len(head) % alignment if data else 0) + data)
    return path


def write_gguf(
    source: Checkpoint,
    path: Path,
    kind: gguf.GGMLQuantizationType = F32,
    pre: str = "",
    up: gguf.GGMLQuantizationType | None = None,
    fused: bool = False,
    joined: bool = False,
    apart: bool = False,
    **split: int,
) -> Path:
    """`source` as llama.cpp's conversion writes it: matrices in `kind`, experts' up in `up`, vectors in float32.

    `fused`: experts' gate and up are one tensor. `joined`: q, k and v are, as the first converters wrote them.
    `apart`: those of delta nets, which Qwen 3 Next has by key head with z, lie by part, as later converters write them.

    With `pre` the vocabulary is the source's, of byte-level BPE; else a made-up one.
    """
    config, family = with_usual_names(source.config), gguf_families()[source.config["model_type"]]
    architecture = ARCHITECTURES.get(family.arch, gguf.MODEL_ARCH.DEEPSEEK2)  # tensors of one that the package lacks
    writer = gguf.GGUFWriter(path, family.arch, **split)  # type: ignore[arg-type]
    drafts = config.get("num_nextn_predict_layers", 0)
    own = any(name.endswith(("mtp.fc.weight", ".eh_proj.weight")) for name in source.tensors)
    for i in range(0 if own else drafts):
        writer.add_tensor(f"blk.{config['num_hidden_layers'] + i}.nextn.enorm.weight", np.ones(4, np.float32))
    _add_sizes(writer, config, source.tensors.get("model.layers.0.feed_forward.w1.weight"))
    _add_rope(writer, config)
    if pre:
        _add_byte_level(writer, source.path, pre)
    else:
        add_vocabulary(writer, config["vocab_size"])
    for key in ("alpha_n", "alpha_p", "beta", "eps"):  # of xIELU
        if numbers := [source.read(name).ravel() for name in source.tensors if name.endswith(f"act_fn.{key}")]:
            writer.add_array(f"xielu.{key}", np.concatenate(numbers).tolist())
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"] + drafts)
    changed = _joined(_stacked(source, family)) if joined else _stacked(source, family)
    for name, values in _apart(changed, config) if apart else changed:
        draft_name, nextn = _draft_name(name, config["num_hidden_layers"])
        both: tuple[str, ...] = (
            draft_name,
            name.removeprefix("transformer."),
        )  # the conversion of BLOOM leaves the prefix out
        for suffix, there in (("router.scale", "ffn_gate_inp"), ("router.per_expert_scale", "ffn_down_exps")):
            if name.endswith(suffix):
                both = ()
                writer.add_tensor(f"blk.{name.split('.')[2]}.{there}.scale", values)
        if not both:
            continue
        renamed = nextn or next(
            filter(None, (names.get_name(one, try_suffixes=(".weight", ".bias")) for one in both)), None
        )
        assert renamed is not None, name
        renamed += ".weight" if name.endswith(("sinks", "layer_scalar", "correct_output_scale")) else ""
        if fused and "ffn_gate_exps" in renamed:
            gate = values
            continue
        if fused and "ffn_up_exps" in renamed:
            renamed, values = renamed.replace("ffn_up", "ffn_gate_up"), np.concatenate([gate, values], axis=1)
        if values.ndim > 1 and kind != F32 and not name.endswith(("bias", "conv.conv.weight")):
            chosen = up if up is not None and "ffn_up_exps" in renamed else kind
            writer.add_tensor(renamed, quantized(values, chosen), raw_dtype=chosen)
        else:
            writer.add_tensor(renamed, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# Of the layer that drafts: as Qwen and as DeepSeek name them, and as files do.
_DRAFTS = (
    ("fc", "eh_proj"),
    ("pre_fc_norm_embedding", "enorm"),
    ("pre_fc_norm_hidden", "hnorm"),
    ("norm", "shared_head.norm"),
)


def _draft_name(name: str, layers: int) -> tuple[str, str]:
    """A tensor as the converter knows it, and its name in a file if the package may lack it."""
    of, layer = f"model.layers.{layers}.", name.replace("mtp.layers.0.", f"model.layers.{layers}.")
    for here, there in _DRAFTS:
        if name in (f"mtp.{here}.weight", f"{of}{there}.weight"):
            return layer, f"blk.{layers}.nextn.{there.replace('.', '_')}.weight"
    return layer, ""


# Where a block has its float16 scale, and a scale that makes numbers of about 0.05 of random codes; its minimum's then.
_SCALES = {"Q2_K": (80, 3e-3, 82, 4e-3), "Q3_K": (108, 1e-3), "Q4_K": (0, 1e-4, 2, 8e-4), "Q5_K": (0, 5e-5, 2, 8e-4),
           "Q6_K": (208, 3e-5), "IQ1_S": (0, 7e-3), "IQ2_XS": (0, 1e-3), "IQ3_S": (0, 4e-4), "IQ4_XS": (0, 5e-5),
           "IQ4_NL": (0, 1e-3), "TQ1_0": (52, 5e-2)}  # fmt: skip
_BYTE_SCALES = {"MXFP4": (1, 120), "NVFP4": (4, 20)}  # that many bytes at the start, and the one that they have


def quantized(values: NDArray[np.float32], kind: gguf.GGMLQuantizationType) -> NDArray[Any]:
    """Blocks of `values`; in formats that the package cannot make, random ones of that shape."""
    if kind.name not in {**_SCALES, **_BYTE_SCALES}:
        return np.asarray(gguf.quants.quantize(values, kind))
    elements, nbytes = gguf.constants.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(values.shape)
    blocks = rng.integers(0, 256, (values.size // elements, nbytes), dtype=np.uint8)
    if kind.name in _BYTE_SCALES:
        count, byte = _BYTE_SCALES[kind.name]
        blocks[:, :count] = byte
    places = iter(_SCALES.get(kind.name, ()))
    for at, scale in zip(places, places):
        blocks[:, int(at) : int(at) + 2] = np.array([scale], "<f2").view(np.uint8)
    return blocks.reshape(*values.shape[:-1], -1)


def add_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """SentencePiece's algorithm over `size` tokens, the first of which are `<unk>`, `<s>` and `</s>`."""
    kinds = gguf.TokenType
    special = ["<unk>", "<s>", "</s>"]
    tokens = [*special, *(chr(ord("a") + i) if i < 26 else f"t{i}" for i in range(size - len(special)))]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL, *[kinds.NORMAL] * (size - len(special))])
    writer.add_token_scores([-float(i) for i in range(size)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}")


def _add_byte_level(writer: gguf.GGUFWriter, folder: Path, pre: str) -> None:
    """The vocabulary, special tokens and chat template of a checkpoint folder."""
    library = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    control = {token["content"]: token["id"] for token in library["added_tokens"]}
    vocab = {**library["model"]["vocab"], **control}
    tokens = sorted(vocab, key=lambda token: vocab[token])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if token in control else gguf.TokenType.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in library["model"]["merges"]])
    writer.add_eos_token_id(vocab[settings["eos_token"]])
    writer.add_pad_token_id(vocab[settings["pad_token"]])
    writer.add_chat_template(settings["chat_template"])


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


def _add_sizes(writer: gguf.GGUFWriter, config: dict[str, Any], gate: TensorInfo | None) -> None:
    """`gate`: the matrix of an MLP whose width is not in config.json."""
    heads, kind = config.get("num_attention_heads", 1), config["model_type"]
    head_dim = _head_dim(config)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    drafts = config.get("num_nextn_predict_layers", 0)
    writer.add_block_count(config["num_hidden_layers"] + drafts)
    if drafts:
        writer.add_nextn_predict_layers(drafts)
    names = ("prefix_dense_intermediate_size", "intermediate_size_mlp", "intermediate_size")
    width = next((config[name] for name in names if config.get(name)), 0)
    kinds = config.get("layers_block_type")
    inner = config.get("moe_intermediate_size") if "moe" in (kinds or ()) else width
    widths = [inner * (one in ("moe", "mlp")) for one in kinds] if kinds else width if gate is None else gate.shape[0]
    writer.add_feed_forward_length(widths)
    writer.add_head_count(heads * ("mamba" not in kind))
    kv_heads = config.get("num_key_value_heads", heads)
    types = config.get("layer_types") or config.get("layers_block_type") or ()
    if period := config.get("attn_layer_period"):
        at = config["attn_layer_offset"]
        types = ["attention" if i % period == at else "mamba" for i in range(config["num_hidden_layers"])]
    if kind == "falcon_mamba":
        writer.add_ssm_dt_b_c_rms(True)
    attend = [one not in ("conv", "linear_attention", "mamba", "mlp", "moe") for one in types]
    one = all(attend) or kind.startswith(("qwen3_5", "qwen3_next"))
    writer.add_head_count_kv(kv_heads if one else [kv_heads * one for one in attend])
    if (sizes := _scan_sizes(config))["state_size"]:
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
    score = "sigmoid" if kind in ("deepseek_v3", "glm4_moe", "dots1", "minimax_m2", "lfm2_moe", "afmoe") else ""
    if score := config.get("expert_selection_fn", score):
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType[score.upper()])
    if kind == "cohere2_moe":
        writer.add_leading_dense_block_count(config["mlp_layer_types"].count("dense"))
    if "routed_scaling_factor" in config or kind == "cohere2_moe":
        writer.add_expert_weights_norm(config["norm_topk_prob"])
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
        "olmo3",
        "starcoder2",
        "afmoe",
    ):
        writer.add_sliding_window(config.get("sliding_window") or 0)
    if kind in ("gemma3n_text", "gemma4_text"):
        _add_gemma4(writer, config)
    if kind in ("exaone4", "olmo3", "cohere2_moe"):
        writer.add_sliding_window_pattern([one == "sliding_attention" for one in types])
    for field, add in (
        ("attn_logit_softcapping", writer.add_attn_logit_softcapping),
        ("final_logit_softcapping", writer.add_final_logit_softcapping),
        ("attention_multiplier", writer.add_attention_scale),
        ("embedding_multiplier", writer.add_embedding_scale),
        ("residual_multiplier", writer.add_residual_scale),
        ("logits_scaling", writer.add_logit_scale),
        ("logit_scale", writer.add_logit_scale),
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
        *((name, writer.add_expert_weights_scale) for name in ("routed_scaling_factor", "route_scale")),
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


def _tiled(config: dict[str, Any], name: str, values: NDArray[np.float32]) -> NDArray[np.float32]:
    """A tensor of a gated delta net with value heads in turn for each key head, where llama.cpp has them so."""
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    begin = 2 * keys * config["linear_key_head_dim"] if ".in_proj_qkv." in name or ".conv1d." in name else 0
    if ".norm." in name:
        return values
    if ".out_proj." in name:
        return np.ascontiguousarray(_tiled(config, "", values.T).T)
    of_values = values[begin:].reshape(keys, heads // keys, -1, *values.shape[1:]).swapaxes(0, 1)
    return np.concatenate([values[:begin], of_values.reshape(values[begin:].shape)])


def _scan_sizes(config: dict[str, Any]) -> dict[str, int]:
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


def _add_rope(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    table = config.get("rope_parameters") or config.get("rope_scaling") or {}
    local = table.get("sliding_attention")
    table = table.get("full_attention", table)
    theta = table.get("rope_theta", config.get("rope_theta", 10000.0))
    head_dim = _head_dim(config)
    partial = config.get("partial_rotary_factor", table.get("partial_rotary_factor", 1.0))
    rotated = int(head_dim * partial)
    kind = table.get("rope_type", table.get("type", "default"))
    if kind == "proportional":
        head_dim = rotated = config["per_layer_config"][str(config["layer_types"].index("full_attention"))]["head_dim"]
        divisors = np.where(np.arange(head_dim // 2) < int(head_dim * partial / 2), 1, 1e30)
        writer.add_tensor("rope_freqs.weight", divisors.astype(np.float32))
    writer.add_rope_freq_base(theta)
    writer.add_rope_dimension_count(rotated)
    if local is not None:
        writer.add_rope_freq_base_swa(local["rope_theta"])
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(table["factor"])
    if config.get("kv_lora_rank") and table.get("mscale_all_dim"):
        writer.add_rope_scaling_yarn_log_mul(0.1 * table["mscale_all_dim"])
    if (beta := table.get("llama_4_scaling_beta")) is not None:
        writer.add_attn_temperature_scale(beta)
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


def _joined(tensors: Iterable[tuple[str, NDArray[np.float32]]]) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """The same with q, k and v of a layer as one tensor, named as its q was in Phi 2."""
    found, parts = dict(tensors), ("q_proj", "k_proj", "v_proj")
    for name, values in found.items():
        if ".q_proj." in name:
            rows = np.concatenate([found[name.replace("q_proj", part)] for part in parts])
            yield "transformer.h.{}.mixer.Wqkv.{}".format(name.split(".")[2], name.split(".")[-1]), rows
        elif not any(f".{part}." in name for part in parts):
            yield name, values


def _apart(
    tensors: Iterator[tuple[str, NDArray[np.float32]]], config: dict[str, Any]
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    dim, value = config["linear_key_head_dim"], config["linear_value_head_dim"] * (heads // keys)
    for name, values in tensors:
        if ".in_proj_qkvz." not in name:
            yield name, values
            continue
        by_head = np.split(values.reshape(keys, -1, values.shape[1]), [dim, 2 * dim, 2 * dim + value], axis=1)
        *qkv, z = (part.reshape(-1, values.shape[1]) for part in by_head)
        yield name.replace("qkvz", "qkv"), np.concatenate(qkv)
        yield name.replace("qkvz", "z"), z


def _stacked(source: Checkpoint, family: GgufFamily) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Every tensor as the conversion of its family changes it; the experts of a layer as one."""
    config = with_usual_names(source.config)
    kind, count = config["model_type"], expert_count(config)
    heads = {"q_proj": config.get("num_attention_heads"), "k_proj": config.get("num_key_value_heads")}
    for name in source.tensors:
        parts = name.split(".")
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        if "altup_" in name and parts[1].endswith("projections"):
            if parts[2] == "0":
                places = [name.replace(".0.", f".{i}.") for i in range(config["altup_num_inputs"] - 1)]
                yield name.replace(".0.", "."), np.stack([source.read(one) for one in places])
            continue
        if "experts" in parts:
            if parts[parts.index("experts") + 1] == "0":
                numbered = name.replace("experts.0.", "experts.{}.")
                stacked = np.stack([source.read(numbered.format(i)) for i in range(count)])
                if kind == "gemma4_text" and parts[-2] != "down_proj":
                    if parts[-2] == "gate_proj":
                        up = [source.read(numbered.replace("gate_proj", "up_proj").format(i)) for i in range(count)]
                        fused = np.concatenate([stacked, np.stack(up)], axis=1)
                        yield name.replace("experts.0.gate_proj", "experts.gate_up_proj"), fused
                    continue
                name = name.replace("backbone", "model").replace("mixer", "mlp")
                yield (
                    f"layers.{parts[2]}.feed_forward.experts.{parts[-2]}.weight"
                    if parts[-2].startswith("w")
                    else (name.replace("experts.0.", "experts.")),
                    stacked,
                )
            continue
        if ".norms." in name:  # of each head
            if ".norms.0." in name:
                parts_of = [one for one in source.tensors if one.startswith(name.rpartition("0.")[0])]
                yield name.replace(".norms.0", ""), np.stack([source.read(one) for one in sorted(parts_of, key=len)])
            continue
        if ".act_fn." in name:
            continue
        values = source.read(name)
        if family.interleaved and parts[-2] in heads:
            halves = values.reshape(heads[parts[-2]], 2, -1, *values.shape[1:])
            values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
        if family.grouped and parts[-2] == "query_key_value":
            count = config.get("num_key_value_heads") or config["num_attention_heads"]
            by_head = values.reshape(count, config["num_attention_heads"] // count + 2, -1, *values.shape[1:])
            apart = (by_head[:, :-2], by_head[:, -2], by_head[:, -1])
            values = np.concatenate([part.reshape(-1, *values.shape[1:]) for part in apart])
        norm = name.endswith("norm.weight") or ".pre_fc_norm_" in name
        if norm and not name.endswith("linear_attn.norm.weight"):
            values = values + np.float32(family.norm_offset)
        if values.ndim == 3:  # a convolution
            values = values.squeeze(1)
        if "linear_attn." in name and kind != "qwen3_next":
            values = _tiled(config, name, values)
        if parts[-2] in ("k_b_proj", "v_b_proj"):
            values = values.reshape(config["num_attention_heads"], -1, values.shape[1])
            if kind == "minicpm3" and parts[-2] == "k_b_proj":
                others = source.read(name.replace("k_b_proj", "v_b_proj"))
                rows = [values.swapaxes(1, 2), others.reshape(len(values), -1, others.shape[1])]
                name, values = name.replace("k_b_proj", "kv_b_proj"), np.concatenate(rows, axis=1)
                values = values.reshape(-1, values.shape[2])
            elif kind == "minicpm3":
                continue
        if name.endswith("A_log"):
            values = -np.exp(values)
        if parts[-1] in ("A_log", "D") and _scan_sizes(config)["group_count"]:
            values = values.reshape(-1, 1)
        if parts[-3:-1] in (["mamba", "norm"], ["mixer", "norm"]):
            values = values.reshape(_scan_sizes(config)["group_count"], -1)
        name = name.replace("dt_bias", "dt_proj.bias")
        name = name.replace("mlp.ffn_sub_norm", "mlp.ffn_layernorm").replace("attn_sub_norm", "inner_attn_ln")
        if kind.startswith("granite"):
            name = name.replace(".shared_mlp.", ".mlp.shared_expert.")
        name = name.replace("correction_bias", "correction.bias").replace("expert_bias", "expert_bias.bias")
        yield name, values.squeeze(0) if len(values) == 1 and values.ndim > 1 else values
