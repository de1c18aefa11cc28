"""GGUF files as checkpoints: their metadata as config.json, their tensors under Hugging Face's names.

Undoes the changes of llama.cpp's conversion: it permutes rows of q and k of `llama` for interleaved rope, adds 1 to
Gemma's norms and stacks experts. The architectures are those of the files in `mlcpipe/models`.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlcpipe.checkpoint.expert_stacks import rows_of
from mlcpipe.checkpoint.gguf.metadata import Metadata
from mlcpipe.checkpoint.gguf.ropes import linear_or_yarn, llama3, longrope, proportional, vector
from mlcpipe.checkpoint.safetensors_reader import TensorInfo
from mlcpipe.errors import ConfigError
from mlcpipe.nn.gguf import MAX_EXPERTS, GgufFamily
from mlcpipe.nn.names import DRAFTS
from mlcpipe.support.json_files import shown

Tensors = Mapping[str, TensorInfo]
Config = dict[str, Any]

ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
_BLOCK = re.compile(r"blk\.(\d{1,4})\.(.+?)(?:\.(weight|bias))?")
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output_norm.bias": "model.norm.bias",
    "output.weight": "lm_head.weight",
    "output.bias": "lm_head.bias",
}
_TOWERS = "clip"  # the architecture of files named mmproj
_BARE = ("attn_sinks", "exp_probs_b", "layer_output_scale")  # no `.weight` or `.bias` in Hugging Face's name
_ROWS = ("ffn_gate_inp_shexp",)  # matrices of one row
_OF_DRAFTS = {f"nextn.{name}": name for name in ("eh_proj", "enorm", "hnorm")} | {"nextn.shared_head_norm": "norm"}
_OF_LOGITS = ("nextn.embed_tokens", "nextn.shared_head_head")  # copies of the model's matrices
_OF_HEADS = ("attn_k_b", "attn_v_b")  # matrices of each head, stacked
_GATE_UP = "ffn_gate_up_exps"  # the rows of both, those of the gate first
# Keys that change the result of families that have them, with their neutral values.
_CHANGES_RESULT: Mapping[str, tuple[object, ...]] = {
    "attention.scale": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "attention.causal": (True,),
    "attention.sliding_window": (0,),
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

    `heads` > 0: rows are in interleaved order within each head; with `kv_heads` > 0 they are those of q, then of k,
    then of v, and Hugging Face has them by KV head. `add` is added to the values as stored. `negative_exp`: the file
    has -exp of the values. `value`: the one number of a tensor that the metadata hold.
    """

    heads: int = 0
    add: float = 0.0
    negative_exp: bool = False
    kv_heads: int = 0
    value: float | None = None

    def in_order(self, stored: NDArray[Any]) -> NDArray[Any]:
        """Rows [n, ...] as stored -> the same in Hugging Face's order."""
        if self.kv_heads:
            size = len(stored) // (self.heads + 2 * self.kv_heads)
            parts = np.split(stored, [self.heads * size, (self.heads + self.kv_heads) * size])
            grouped = [part.reshape(self.kv_heads, -1, *stored.shape[1:]) for part in parts]
            return np.concatenate(grouped, axis=1).reshape(stored.shape)
        if self.heads:
            pairs = stored.reshape(self.heads, -1, 2, *stored.shape[1:])
            return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(stored.shape)
        return stored


class _File:
    """The keys of an architecture and the tensors of a file, as `GgufFile`; `read` are the keys that were asked for."""

    def __init__(self, metadata: Metadata, arch: str, tensors: Tensors) -> None:
        self._metadata, self._arch, self._tensors = metadata, arch, tensors
        self.read: set[str] = set()

    def __contains__(self, tensor: str) -> bool:
        return tensor in self._tensors

    def rows(self, tensor: str) -> int:
        found = self._tensors.get(tensor)
        return found.shape[0] if found is not None and found.shape else 0

    def vector(self, tensor: str, count: int) -> NDArray[np.float32]:
        found = self._tensors.get(tensor)
        if found is None:
            raise ConfigError(f"no tensor {tensor}", where=self._metadata.where, expected=f"{count} numbers")
        return vector(found, count)

    def integer(self, key: str, default: int | None = None) -> int:
        return self._metadata.integer(self._full(key), default)

    def number(self, key: str, default: float | None = None) -> float:
        return self._metadata.number(self._full(key), default)

    def numbers(self, key: str, count: int) -> NDArray[Any]:
        return self._metadata.numbers(self._full(key), count)

    def get(self, key: str, default: Any = None) -> Any:
        return self._metadata.values.get(self._full(key), default)

    def error(self, key: str, expected: object, found: object = None) -> ConfigError:
        return self._metadata.error(self._full(key), expected, found)

    def _full(self, key: str) -> str:
        self.read.add(key)
        return f"{self._arch}.{key}"


@functools.cache
def _families() -> Mapping[str, list[tuple[str, GgufFamily]]]:
    """The families with their model types, by architecture; the fallback of an architecture comes last."""
    from mlcpipe.models import gguf_families

    found: dict[str, list[tuple[str, GgufFamily]]] = {}
    for name, family in gguf_families().items():
        for arch in (family.arch, *family.also):
            found.setdefault(arch, []).append((name, family))
    return {arch: sorted(some, key=lambda one: one[1].applies is None) for arch, some in found.items()}


def family_of(metadata: Metadata, tensors: Tensors) -> tuple[GgufFamily, Config]:
    """The family of a file, and its config.json. Raises ConfigError for an architecture that mlcpipe does not have."""
    arch = metadata.text("general.architecture")
    if arch == _TOWERS:
        raise ConfigError(
            "the file has the parts of a model that read pictures or sound", where=metadata.where,
            expected="its text model", next_step="give the other file of the model, without mmproj in its name",
        )  # fmt: skip
    if arch not in _families():
        raise ConfigError(
            "unknown architecture", where=f"general.architecture of {metadata.where}",
            expected=f"one of the {len(_families())} in docs/families.md, such as llama or qwen3", found=shown(arch),
        )  # fmt: skip
    model_type, family = next(
        (name, one)
        for name, one in _families()[arch]
        if one.applies is None or one.applies(_File(metadata, arch, tensors))
    )
    config = _shared_fields(metadata, arch, family, tensors)
    config["num_key_value_heads"] = _kv_heads(metadata, arch, family, config["num_attention_heads"])
    config["model_type"] = model_type
    rope = (
        longrope(metadata, arch, tensors)
        if family.rope == "longrope"
        else _rope(metadata, arch, tensors, config, family.rope)
    )
    if rope is not None:
        config["rope_scaling"] = rope
    file = _File(metadata, arch, tensors)
    if family.complete is not None:
        family.complete(file, config)
    for key, neutral in _CHANGES_RESULT.items():
        value = neutral[0] if key in file.read else file.get(key, neutral[0])
        if not isinstance(value, (bool, int, float)) or value not in neutral:
            raise file.error(key, f"{neutral[0]}, or no such key", shown(value))
    _check_vocabulary(metadata, config["vocab_size"])
    return family if family.names_of is None else replace(family, names=family.names_of(file)), config


def numbers_of_layers(metadata: Metadata, family: GgufFamily, config: Config, path: Path) -> Iterator[GgufTensor]:
    """The tensors of one number whose values are in the metadata. Raises ConfigError for others than there must be."""
    for key, name in family.numbers.items():
        for layer, value in enumerate(metadata.numbers(key, config["num_hidden_layers"]).tolist()):
            if not isinstance(value, float) or not math.isfinite(value):
                raise metadata.error(key, "finite numbers", shown(value))
            if isinstance(name, str):
                yield GgufTensor(f"model.layers.{layer}.{name}", (1,), "float32", path, 0, 4, value=value)
            elif not math.isclose(value, name, rel_tol=1e-6):
                raise metadata.error(key, f"{name:g} in all layers", value)


def renamed(tensors: Tensors, family: GgufFamily, config: Config) -> Iterator[GgufTensor]:
    """The tensors under Hugging Face's names, those of stacked experts apart; unknown ones keep their name."""
    from mlcpipe.models import checkpoint_names

    layers, drafts = config["num_hidden_layers"], config.get("num_nextn_predict_layers", 0)
    names = checkpoint_names(config["model_type"]).with_draft_layer(layers)
    drafts_itself = drafts == 1 and f"blk.{layers}.nextn.eh_proj.weight" in tensors

    def published(name: str) -> str:
        return names.candidates(name)[0]

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name, tensor in tensors.items():
        if name in ROPE_FACTORS:
            continue
        match = _BLOCK.fullmatch(name)
        if match is None:
            name = _TOP.get(name, name)
            part, _, suffix = name.rpartition(".")
            name = f"model.{family.names[part]}.{suffix}" if part in family.names else name
            if "{}" in name:
                yield from _matrices(tensor, published(name))
                continue
            offset = family.norm_offset if family.last_offset is None else family.last_offset
            yield _as(tensor, published(name), add=-offset if name.endswith("norm.weight") else 0.0)
            continue
        layer, part, suffix = match.groups()
        if part in family.folded:
            continue
        of = f"model.layers.{layer}"
        if 0 <= int(layer) - layers < drafts:
            if not drafts_itself or part in _OF_LOGITS:
                continue
            of = "mtp" if part in _OF_DRAFTS else DRAFTS
        if part in _OF_HEADS and len(tensor.shape) == 3:
            tensor = replace(tensor, shape=(tensor.shape[0] * tensor.shape[1], tensor.shape[2]))
        if part in _ROWS and len(tensor.shape) == 1:
            tensor = replace(tensor, shape=(1, *tensor.shape))
        whole = f"{part}.{suffix}" if suffix else part
        if whole in family.names or (part in _BARE and part in family.names):
            bare = _as(tensor, published(f"{of}.{family.names.get(whole) or family.names[part]}"))
            yield replace(bare, negative_exp=part == "ssm_a")
        elif not suffix:
            yield _as(tensor, name)
        elif part in family.experts or (part == _GATE_UP and family.experts):
            parts = ("ffn_gate_exps", "ffn_up_exps") if part == _GATE_UP else (part,)
            for i, one in enumerate(parts):
                pattern = f"{of}.{family.experts[one]}.{suffix}"
                yield from _unstacked(tensor, published(pattern), config, i, len(parts))
        elif part == "attn_qkv" and part not in family.names and "attn_q" in family.names and not family.interleaved:
            for one, rows in _apart(tensor, heads["attn_q"], heads["attn_k"]):
                yield _as(rows, published(f"{of}.{family.names[one]}.{suffix}"))
        elif "{}" in family.names.get(part, ""):
            yield from _single_rows(tensor, published(f"{of}.{family.names[part]}.{suffix}"))
        elif part in _OF_DRAFTS:
            add = -family.norm_offset if part.endswith("norm") else 0.0
            yield _as(tensor, published(f"{of}.{_OF_DRAFTS[part]}.{suffix}"), add=add)
        elif part in family.names:
            interleaved = heads.get(part, 0) if family.interleaved else 0
            of_norm = part.endswith("norm") and part != "ssm_norm" and suffix == "weight"
            add = -family.norm_offset if of_norm else 0.0
            found = _as(tensor, published(f"{of}.{family.names[part]}.{suffix}"), interleaved, add)
            yield _grouped(found, heads["attn_q"], heads["attn_k"]) if part == "attn_qkv" and family.grouped else found
        else:
            yield _as(tensor, name)


def _as(tensor: TensorInfo, name: str, heads: int = 0, add: float = 0.0) -> GgufTensor:
    if heads and tensor.shape[0] % (2 * heads):
        raise ConfigError(f"the rows of {name}", expected=f"a multiple of 2 * {heads} heads", found=tensor.shape[0])
    return GgufTensor(name, tensor.shape, tensor.dtype, tensor.file, tensor.offset, tensor.nbytes, heads, add)


def _apart(tensor: TensorInfo, heads: int, kv_heads: int) -> Iterator[tuple[str, TensorInfo]]:
    """The rows of q, of k and of v, which lie one after the other."""
    size, rest = divmod(tensor.shape[0], heads + 2 * kv_heads)
    if rest or not size:
        expected = f"a multiple of {heads} + 2 * {kv_heads} heads"
        raise ConfigError(f"the rows of {shown(tensor.name)}", expected=expected, found=tensor.shape[0])
    begin, row = 0, tensor.nbytes // tensor.shape[0]
    for name, count in (("attn_q", heads * size), ("attn_k", kv_heads * size), ("attn_v", kv_heads * size)):
        shape, nbytes = (count, *tensor.shape[1:]), count * row
        yield name, replace(tensor, shape=shape, offset=tensor.offset + begin, nbytes=nbytes)
        begin += nbytes


def _single_rows(tensor: TensorInfo, pattern: str) -> Iterator[GgufTensor]:
    """Each row of a matrix, as a vector. Raises ConfigError for another tensor."""
    if len(tensor.shape) != 2 or tensor.shape[0] > MAX_EXPERTS:
        expected = f"at most {MAX_EXPERTS} rows, one for each head"
        raise ConfigError(f"tensor {shown(tensor.name)}", expected=expected, found=list(tensor.shape))
    for i in range(tensor.shape[0]):
        yield _as(replace(rows_of(tensor, i, tensor.shape[0]), shape=tensor.shape[1:]), pattern.format(i))


def _matrices(tensor: TensorInfo, pattern: str) -> Iterator[GgufTensor]:
    """Each matrix of a stack. Raises ConfigError for another tensor."""
    if len(tensor.shape) != 3 or tensor.shape[0] > MAX_EXPERTS:
        expected = f"at most {MAX_EXPERTS} matrices"
        raise ConfigError(f"tensor {shown(tensor.name)}", expected=expected, found=list(tensor.shape))
    nbytes = tensor.nbytes // tensor.shape[0]
    for i in range(tensor.shape[0]):
        part = replace(tensor, shape=tensor.shape[1:], offset=tensor.offset + i * nbytes, nbytes=nbytes)
        yield _as(part, pattern.format(i))


def _grouped(tensor: GgufTensor, heads: int, kv_heads: int) -> GgufTensor:
    if not kv_heads or heads % kv_heads or tensor.shape[0] % (heads + 2 * kv_heads):
        expected = f"a multiple of {heads} + 2 * {kv_heads} heads"
        raise ConfigError(f"the rows of {tensor.name}", expected=expected, found=tensor.shape[0])
    return replace(tensor, heads=heads, kv_heads=kv_heads)


def _unstacked(tensor: TensorInfo, pattern: str, config: Config, i: int, parts: int) -> Iterator[GgufTensor]:
    """Range i of `parts` of the rows of matrices [experts, n, k] or biases [experts, n], which lie one after the other.

    Raises ConfigError for another shape.
    """
    count, rank = config["num_experts"], 2 if pattern.endswith(".bias") else 3
    if len(tensor.shape) != rank or tensor.shape[0] != count or tensor.shape[1] % parts:
        expected = f"[{count}, n{', k' if rank == 3 else ''}]" + (", n even" if parts == 2 else "")
        raise ConfigError(
            f"tensor {shown(tensor.name)} has the wrong shape", expected=expected, found=list(tensor.shape)
        )
    nbytes = tensor.nbytes // count
    for expert in range(count):
        part = replace(tensor, shape=tensor.shape[1:], offset=tensor.offset + expert * nbytes, nbytes=nbytes)
        yield _as(rows_of(part, i, parts), pattern.format(expert))


def _shared_fields(metadata: Metadata, arch: str, family: GgufFamily, tensors: Tensors) -> Config:
    """The fields of config.json that all families have; a head of `latent` attention is what rope rotates of it."""
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ConfigError("no embedding", where=metadata.where, expected="a matrix token_embd.weight")
    hidden, key = metadata.integer(f"{arch}.embedding_length"), f"{arch}.attention.head_count"
    listed = family.by_layer and isinstance(metadata.values.get(key), np.ndarray)
    heads = hidden if listed else metadata.integer(key)  # `complete` reads the list
    heads = heads or metadata.integer(f"{arch}.ssm.time_step_rank", 0)  # where no layer attends
    if not 0 < heads <= hidden:
        raise metadata.error(f"{arch}.attention.head_count", f"1 to {hidden}", heads)
    size = "rope.dimension_count" if family.latent else "attention.key_length"
    head_dim = metadata.integer(f"{arch}.{size}", hidden // heads)
    if not family.latent and metadata.integer(f"{arch}.attention.value_length", head_dim) != head_dim:
        raise metadata.error(f"{arch}.attention.value_length", f"{head_dim}, the length of keys")
    layer_norm, rms_norm = (f"{arch}.attention.layer_norm_{kind}epsilon" for kind in ("", "rms_"))
    return {
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": _width(metadata, arch, family),
        "num_hidden_layers": metadata.integer(f"{arch}.block_count"),
        "num_attention_heads": heads,
        "head_dim": head_dim,
        "max_position_embeddings": metadata.integer(f"{arch}.context_length"),
        "rms_norm_eps": metadata.number(layer_norm if layer_norm in metadata.values else rms_norm),
        "rope_theta": metadata.number(f"{arch}.rope.freq_base", 10_000.0),
        "tie_word_embeddings": "output.weight" not in tensors,
    }


def _width(metadata: Metadata, arch: str, family: GgufFamily) -> int:
    """The width of MLPs. Where not all layers attend it may be listed by layer, 0 for those without."""
    key = f"{arch}.feed_forward_length"
    if family.by_layer:
        return 0
    if not family.some_attend or isinstance(metadata.values.get(key), int):
        return metadata.integer(key, 0 if family.experts else None)  # without dense MLPs there is none
    widths = metadata.numbers(key, metadata.integer(f"{arch}.block_count"))
    if widths.dtype.kind not in "iu" or not widths.size:
        raise metadata.error(key, "an integer for each layer")
    return int(widths.max())


def _kv_heads(metadata: Metadata, arch: str, family: GgufFamily, heads: int) -> int:
    """The KV heads of all layers that attend."""
    key = f"{arch}.attention.head_count_kv"
    if family.by_layer:
        return 0
    if not family.some_attend:
        return metadata.integer(key, heads)
    counts = metadata.numbers(key, metadata.integer(f"{arch}.block_count"))
    found = set(counts.tolist()) - {0}
    if counts.dtype.kind not in "iu" or len(found) != 1 or min(found) < 0:
        raise metadata.error(key, "one integer for all layers that attend", shown(sorted(found)))
    return int(found.pop())


def _check_vocabulary(metadata: Metadata, rows: int) -> None:
    """The vocabulary: as many tokens as the embedding has rows."""
    tokens = metadata.strings("tokenizer.ggml.tokens")
    if len(tokens) != rows:
        raise metadata.error("tokenizer.ggml.tokens", f"{rows} tokens, the rows of token_embd.weight", len(tokens))


def _rope(metadata: Metadata, arch: str, tensors: Tensors, config: Config, kind: str) -> Config | None:
    """The scaling of rope over whole heads, over a part of each, or with angles for a part."""
    rotated = metadata.integer(f"{arch}.rope.dimension_count", config["head_dim"])
    if kind == "partial" and 0 < rotated <= config["head_dim"]:
        config["partial_rotary_factor"] = math.nextafter(rotated / config["head_dim"], 1.0)  # which truncation undoes
    elif rotated != config["head_dim"]:
        raise metadata.error(f"{arch}.rope.dimension_count", f"{config['head_dim']}, the size of a head", rotated)
    table = linear_or_yarn(metadata, arch)
    if "rope_freqs.weight" not in tensors:
        return table
    if table is not None:
        raise metadata.error(f"{arch}.rope.scaling.type", "none beside rope_freqs.weight")
    if kind == "proportional":
        return proportional(tensors["rope_freqs.weight"], rotated)
    return llama3(tensors["rope_freqs.weight"], config["rope_theta"], rotated)
