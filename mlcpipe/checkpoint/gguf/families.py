"""Architectures of GGUF files: the config.json that their metadata stand for, and the names of their tensors.

Keys and tensor names are llama.cpp's (gguf-py/gguf/constants.py). What its conversion changes is undone: rows of q and
k of `llama` are permuted for interleaved rope, Gemma's norms have 1 added, experts are stacked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mlcpipe.checkpoint.gguf.metadata import Metadata
from mlcpipe.checkpoint.gguf.ropes import linear_or_yarn, llama3, longrope
from mlcpipe.checkpoint.safetensors_reader import TensorInfo
from mlcpipe.errors import ConfigError
from mlcpipe.json_files import shown

Tensors = Mapping[str, TensorInfo]
Config = dict[str, Any]

ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
MAX_EXPERTS = 4096
_BLOCK = re.compile(r"blk\.(\d{1,4})\.(.+)\.(weight|bias)")
_TOP = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_ATTENTION = {
    "attn_norm": "input_layernorm",
    **{f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"},
    **{f"attn_{x}_norm": f"self_attn.{x}_norm" for x in "qk"},
    "attn_output": "self_attn.o_proj",
}
_MLP = {f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")}
_PRE_NORM = {**_ATTENTION, **_MLP, "ffn_norm": "post_attention_layernorm"}
_POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_SANDWICH = {**_ATTENTION, **_MLP, **_POST_NORMS, "ffn_norm": "pre_feedforward_layernorm"}
# Keys that change the result and that none of the families has, with the values that do not.
_REFUSED: Mapping[str, tuple[object, ...]] = {
    "attention.scale": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "attention.causal": (True,),
    "embedding_scale": (0.0, 1.0),
    "expert_shared_count": (0,),
    "expert_weights_scale": (0.0, 1.0),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "swiglu_clamp_exp": (0.0,),
    "use_parallel_residual": (False,),
}


@dataclass(frozen=True)
class GgufTensor(TensorInfo):
    """A tensor under its name in Hugging Face's layout.

    `heads` > 0: rows are in interleaved order within each head. `add` is added to the values as stored.
    """

    heads: int = 0
    add: float = 0.0


@dataclass(frozen=True)
class Family:
    """How an architecture becomes a `model_type`.

    `names` are those of a block's tensors, `experts` a pattern with the expert's number for each stacked tensor;
    `complete` adds fields to config.json.
    """

    model_type: str
    complete: Callable[[Metadata, str, Tensors, Config], None]
    names: Mapping[str, str] = field(default_factory=lambda: _PRE_NORM)
    experts: Mapping[str, str] = field(default_factory=dict)
    interleaved: bool = False
    norm_offset: float = 0.0
    sinks: bool = False


def family_of(metadata: Metadata, tensors: Tensors) -> tuple[Family, Config]:
    """The family of a file, and its config.json. Raises ConfigError for an architecture that mlcpipe does not have."""
    arch = metadata.text("general.architecture")
    family = _FAMILIES.get(arch)
    if family is None:
        raise metadata.error("general.architecture", ", ".join(sorted(_FAMILIES)), shown(arch))
    if arch == "llama" and metadata.integer("llama.expert_count", 0):
        family = _MIXTRAL
    elif arch == "llama" and metadata.integer("llama.attention.sliding_window", 0):
        family = replace(family, model_type="mistral")
    for key, neutral in _REFUSED.items():
        value = metadata.values.get(f"{arch}.{key}", neutral[0])
        if not isinstance(value, (bool, int, float)) or value not in neutral:
            raise metadata.error(f"{arch}.{key}", f"{neutral[0]}, or no such key", shown(value))
    config = _shared_fields(metadata, arch, tensors)
    config["model_type"] = family.model_type
    family.complete(metadata, arch, tensors, config)
    _check_vocabulary(metadata, config["vocab_size"])
    return family, config


def renamed(tensors: Tensors, family: Family, config: Config) -> Iterator[GgufTensor]:
    """The tensors under Hugging Face's names, those of stacked experts apart; unknown ones keep their name."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name, tensor in tensors.items():
        if name in ROPE_FACTORS:
            continue
        match = _BLOCK.fullmatch(name)
        if match is None:
            name = "lm_head.weight" if name == "output.weight" else _TOP.get(name, name)
            yield _as(tensor, name, add=-family.norm_offset if name.endswith("norm.weight") else 0.0)
            continue
        layer, part, suffix = match.groups()
        if part == "attn_sinks":
            yield _as(tensor, f"model.layers.{layer}.self_attn.sinks" if family.sinks else name)
        elif part in family.experts:
            yield from _unstacked(tensor, f"model.layers.{layer}.{family.experts[part]}.{suffix}", config)
        elif part in family.names:
            interleaved = heads.get(part, 0) if family.interleaved else 0
            add = -family.norm_offset if part.endswith("norm") else 0.0
            yield _as(tensor, f"model.layers.{layer}.{family.names[part]}.{suffix}", interleaved, add)
        else:
            yield _as(tensor, name)


def _as(tensor: TensorInfo, name: str, heads: int = 0, add: float = 0.0) -> GgufTensor:
    if heads and tensor.shape[0] % (2 * heads):
        raise ConfigError(f"the rows of {name}", expected=f"a multiple of 2 * {heads} heads", found=tensor.shape[0])
    return GgufTensor(name, tensor.shape, tensor.dtype, tensor.file, tensor.offset, tensor.nbytes, heads, add)


def _unstacked(tensor: TensorInfo, pattern: str, config: Config) -> Iterator[GgufTensor]:
    """The matrices of [experts, n, k] or the biases of [experts, n], which lie one after the other."""
    count, rank = config["num_experts"], 2 if pattern.endswith(".bias") else 3
    if len(tensor.shape) != rank or tensor.shape[0] != count:
        expected = f"[{count}, n{', k' if rank == 3 else ''}]"
        raise ConfigError(
            f"tensor {shown(tensor.name)} has the wrong shape", expected=expected, found=list(tensor.shape)
        )
    nbytes = tensor.nbytes // count
    for expert in range(count):
        part = replace(tensor, shape=tensor.shape[1:], offset=tensor.offset + expert * nbytes, nbytes=nbytes)
        yield _as(part, pattern.format(expert))


def _shared_fields(metadata: Metadata, arch: str, tensors: Tensors) -> Config:
    """The fields of config.json that all families have."""
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ConfigError("no embedding", where=metadata.where, expected="a matrix token_embd.weight")
    hidden, heads = (metadata.integer(f"{arch}.{key}") for key in ("embedding_length", "attention.head_count"))
    if not 0 < heads <= hidden:
        raise metadata.error(f"{arch}.attention.head_count", f"1 to {hidden}", heads)
    head_dim = metadata.integer(f"{arch}.attention.key_length", hidden // heads)
    if metadata.integer(f"{arch}.attention.value_length", head_dim) != head_dim:
        raise metadata.error(f"{arch}.attention.value_length", f"{head_dim}, the length of keys")
    return {
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": metadata.integer(f"{arch}.feed_forward_length"),
        "num_hidden_layers": metadata.integer(f"{arch}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.integer(f"{arch}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": metadata.integer(f"{arch}.context_length"),
        "rms_norm_eps": metadata.number(f"{arch}.attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.number(f"{arch}.rope.freq_base", 10_000.0),
        "tie_word_embeddings": "output.weight" not in tensors,
    }


def _check_vocabulary(metadata: Metadata, rows: int) -> None:
    """As many tokens as the embedding has rows."""
    tokens = metadata.strings("tokenizer.ggml.tokens")
    if len(tokens) != rows:
        raise metadata.error("tokenizer.ggml.tokens", f"{rows} tokens, the rows of token_embd.weight", len(tokens))


def _full_rope(metadata: Metadata, arch: str, tensors: Tensors, config: Config) -> None:
    """Rope over whole heads, scaled as the file says."""
    rotated = metadata.integer(f"{arch}.rope.dimension_count", config["head_dim"])
    if rotated != config["head_dim"]:
        raise metadata.error(f"{arch}.rope.dimension_count", f"{config['head_dim']}, the size of a head", rotated)
    if (table := linear_or_yarn(metadata, arch)) is not None:
        config["rope_scaling"] = table
    if "rope_freqs.weight" in tensors:
        if table is not None:
            raise metadata.error(f"{arch}.rope.scaling.type", "none beside rope_freqs.weight")
        config["rope_scaling"] = llama3(tensors["rope_freqs.weight"], config["rope_theta"], rotated)


def _llama(metadata: Metadata, arch: str, tensors: Tensors, config: Config) -> None:
    _full_rope(metadata, arch, tensors, config)
    config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    config["mlp_bias"] = "blk.0.ffn_up.bias" in tensors
    if window := metadata.integer(f"{arch}.attention.sliding_window", 0):
        config["sliding_window"] = window


def _mixtral(metadata: Metadata, arch: str, tensors: Tensors, config: Config) -> None:
    _llama(metadata, arch, tensors, config)
    _experts(metadata, arch, config)


def _experts(metadata: Metadata, arch: str, config: Config) -> None:
    count, used = (metadata.integer(f"{arch}.{key}") for key in ("expert_count", "expert_used_count"))
    if not 0 < used <= count <= MAX_EXPERTS:
        raise metadata.error(f"{arch}.expert_count", f"{used} to {MAX_EXPERTS}", count)
    config["num_experts"], config["num_experts_per_tok"] = count, used


def _qwen2(metadata: Metadata, arch: str, tensors: Tensors, config: Config) -> None:
    _full_rope(metadata, arch, tensors, config)
    if window := metadata.integer(f"{arch}.attention.sliding_window", 0):
        raise metadata.error(f"{arch}.attention.sliding_window", "0, or no such key", window)


def _qwen3(metadata: Metadata, arch: str, tensors: Tensors, config: Config) -> None:
    _qwen2(metadata, arch, tensors, config)
    config["attention_bias"] = "blk.0.attn_q.bias" in tensors


def _qwen3_moe(metadata: Metadata, arch: str, tensors: Tensors, config: Config) -> None:
    _qwen3(metadata, arch, tensors, config)
    _experts(metadata, arch, config)
    width = metadata.integer(f"{arch}.expert_feed_forward_length")
    config.update(moe_intermediate_size=width, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[])


def _gpt_oss(metadata: Metadata, arch: str, tensors: Tensors, config: Config) -> None:
    """The file says neither which layers slide, every second one, nor that the ramp of YaRN is not rounded."""
    _full_rope(metadata, arch, tensors, config)
    _experts(metadata, arch, config)
    config["intermediate_size"] = metadata.integer(f"{arch}.expert_feed_forward_length", config["intermediate_size"])
    config["sliding_window"] = metadata.integer(f"{arch}.attention.sliding_window")
    config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    config["rope_scaling"] = {**(config.get("rope_scaling") or {"rope_type": "default"}), "truncate": False}


def _gemma2(metadata: Metadata, arch: str, tensors: Tensors, config: Config) -> None:
    _gemma(metadata, arch, tensors, config, period=2, window=4096, largest_layers=46)
    for key, default in (("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0)):
        config[key] = metadata.number(f"{arch}.{key}", default)


def _gemma3(metadata: Metadata, arch: str, tensors: Tensors, config: Config) -> None:
    _gemma(metadata, arch, tensors, config, period=6, window=0, largest_layers=62)
    config["rope_local_base_freq"] = metadata.number(f"{arch}.rope.freq_base_swa", 10_000.0)
    config["final_logit_softcapping"] = metadata.number(f"{arch}.final_logit_softcapping", 0.0) or None


def _gemma(
    metadata: Metadata, arch: str, tensors: Tensors, config: Config, *, period: int, window: int, largest_layers: int
) -> None:
    """What Gemma 2 and 3 share; llama.cpp tells the 27B model, which scales queries otherwise, by its layers."""
    _full_rope(metadata, arch, tensors, config)
    layers, width = config["num_hidden_layers"], config["hidden_size"] // config["num_attention_heads"]
    config["hidden_activation"] = "gelu_pytorch_tanh"
    config["query_pre_attn_scalar"] = width if layers == largest_layers else config["head_dim"]
    window = metadata.integer(f"{arch}.attention.sliding_window", window)
    stated = metadata.values.get(f"{arch}.attention.sliding_window_pattern", period)
    if type(stated) is int and stated > 0:
        slides = [(i + 1) % stated != 0 for i in range(min(layers, 1024))]
    else:
        slides = metadata.numbers(f"{arch}.attention.sliding_window_pattern", layers).astype(bool).tolist()
    config["sliding_window"] = window or None
    config["layer_types"] = [f"{'sliding' if slide and window else 'full'}_attention" for slide in slides]


def _phi3(metadata: Metadata, arch: str, tensors: Tensors, config: Config) -> None:
    rotated = metadata.integer(f"{arch}.rope.dimension_count", config["head_dim"])
    config["partial_rotary_factor"] = rotated / config["head_dim"]
    config["sliding_window"] = metadata.integer(f"{arch}.attention.sliding_window", 0) or None
    original = metadata.integer(f"{arch}.rope.scaling.original_context_length", config["max_position_embeddings"])
    config["original_max_position_embeddings"] = original
    if (table := longrope(metadata, arch, tensors)) is not None:
        config["rope_scaling"] = table


_MIXTRAL_NAMES = {"gate": "w1", "up": "w3", "down": "w2"}
_LLAMA = Family("llama", _llama, interleaved=True)
_MIXTRAL = Family(
    "mixtral",
    _mixtral,
    {**_PRE_NORM, "ffn_gate_inp": "block_sparse_moe.gate"}
    | {f"ffn_{x}.{i}": f"block_sparse_moe.experts.{i}.{w}" for i in range(64) for x, w in _MIXTRAL_NAMES.items()},
    {f"ffn_{x}_exps": f"block_sparse_moe.experts.{{}}.{w}" for x, w in _MIXTRAL_NAMES.items()},
    interleaved=True,
)
_FAMILIES = {
    "llama": _LLAMA,
    "qwen2": Family("qwen2", _qwen2),
    "qwen3": Family("qwen3", _qwen3),
    "qwen3moe": Family(
        "qwen3_moe",
        _qwen3_moe,
        {**_PRE_NORM, "ffn_gate_inp": "mlp.gate"},
        {f"ffn_{x}_exps": f"mlp.experts.{{}}.{x}_proj" for x in ("gate", "up", "down")},
    ),
    "gpt-oss": Family(
        "gpt_oss",
        _gpt_oss,
        {**_ATTENTION, "post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"},
        {f"ffn_{x}_exps": f"mlp.experts.{{}}.{x}_proj" for x in ("gate", "up", "down")},
        sinks=True,
    ),
    "gemma2": Family("gemma2", _gemma2, _SANDWICH, norm_offset=1.0),
    "gemma3": Family("gemma3_text", _gemma3, _SANDWICH, norm_offset=1.0),
    "phi3": Family("phi3", _phi3, {**_PRE_NORM, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}),
    "olmo2": Family("olmo2", _qwen3, {**_ATTENTION, **_MLP, **_POST_NORMS}),
}
