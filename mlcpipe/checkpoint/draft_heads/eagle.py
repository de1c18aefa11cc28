"""EAGLE-3 heads (Li et al. 2025): one decoder layer over three hidden states of a model and the token after them.

Names are those of the authors' checkpoints, `fc`, `midlayer`, `norm`, `lm_head`, or of the speculators package, with
`layers.0`: https://github.com/SafeAILab/EAGLE, eagle/model/cnets.py; vLLM's models/llama_eagle3.py reads both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlcpipe.checkpoint.checkpoint import CONFIG, Checkpoint, DraftHead
from mlcpipe.checkpoint.draft_heads.files import HeadFiles, check_tensors
from mlcpipe.checkpoint.safetensors_reader import TensorInfo, read_bytes
from mlcpipe.errors import CheckpointError, ConfigError
from mlcpipe.support.json_files import shown, shown_path

PREFIX = "eagle_head."  # of the tensors' names in the model
KEPT_LAYERS = 3
_MAX_SIZE = 1 << 20
_PART_BYTES = 4 << 20
_EMBEDDING = "embed_tokens.weight"
# Fields that would change the result, with the values that do not.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "num_hidden_layers": (1,),
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "norm_before_fc": (None, False),
    "use_aux_hidden_state": (None, True),
    "use_last_layernorm": (None, True),
    "use_input_layernorm_in_first_layer": (None, True),
    "has_lm_head": (None, True),
    "parallel_draft_step": (None, 1),
    "parallel_drafting": (None, False),
    "model_type": ("llama",),
    "norm_before_residual": (None, False, True),
}


@dataclass(frozen=True)
class EagleHead(DraftHead):
    """The layer of `config`, which has the fields of a Llama's config.json.

    `layers`: the model's layers whose inputs it reads. `vocab`: tokens that it guesses; `places` i32[V] maps each token
    of the model to one of them, -1 for none; None if they are the same. With `norm_before_residual` the residual is
    the layer's normalized input. `embeds`: it has an embedding of its own.
    """

    config: Mapping[str, Any]
    layers: tuple[int, ...]
    vocab: int
    places: NDArray[np.int32] | None
    norm_before_residual: bool
    embeds: bool


def read_eagle_head(files: HeadFiles, checkpoint: Checkpoint) -> EagleHead | None:
    """The head of a folder; None where it has none. Raises CheckpointError and ConfigError for one of another model."""
    tensors = {name.replace("layers.0.", "midlayer.", 1): tensor for name, tensor in files.tensors.items()}
    if "fc.weight" not in tensors:
        return None
    where = shown_path(files.path)
    outer, nested = files.config, _object(files.config, "eagle_config", where)
    layer = _object(outer, "transformer_layer_config", where)
    config = {**outer, **layer}
    for name, values in _NEUTRAL.items():
        value = nested.get(name, config.get(name))
        if value not in values:
            raise ConfigError(
                f"field {name} is not supported", where=f"{where} config.json",
                expected=f"one of {list(values)}", found=shown(value),
            )  # fmt: skip
    vocab = _size(checkpoint.config, "vocab_size", "config.json")
    guessed = config.get("draft_vocab_size")
    guessed = vocab if guessed is None else _size(config, "draft_vocab_size", where, most=vocab)
    to_target, known = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if to_target is None and guessed != vocab:
        raise CheckpointError("tensor d2t of the draft head is missing", where=where)
    places = None if to_target is None else _places(to_target, known, guessed, vocab, where)
    embeds = _EMBEDDING in tensors and not _same(tensors[_EMBEDDING], checkpoint.tensors.get(f"model.{_EMBEDDING}"))
    if not embeds:
        tensors.pop(_EMBEDDING, None)
    check_tensors(tensors, _shapes(config, checkpoint, guessed, where, embeds=embeds), files.path)
    named = {PREFIX + name: tensor for name, tensor in tensors.items()}
    layers, own_files = _layers(outer, nested, checkpoint, where), (files.path / CONFIG, *files.files)
    before = config.get("norm_before_residual") is True
    return EagleHead(files.path, own_files, named, config, layers, guessed, places, before, embeds)


def _shapes(
    config: Mapping[str, Any], checkpoint: Checkpoint, guessed: int, where: str, *, embeds: bool
) -> dict[str, tuple[object, ...]]:
    """The shape of each tensor by name, without the token maps."""
    h, width, heads = (
        _size(config, name, where) for name in ("hidden_size", "intermediate_size", "num_attention_heads")
    )
    kv_heads = _size({"num_key_value_heads": heads, **config}, "num_key_value_heads", where)
    dim = _size({**config, "head_dim": config.get("head_dim") or h // heads}, "head_dim", where)
    target = _size(checkpoint.config, "hidden_size", "config.json")
    if not embeds and h != target:
        raise CheckpointError(
            f"tensor {_EMBEDDING} of the draft head is missing", where=where,
            expected=f"an embedding of its own, as its hidden size is not the model's {target}", found=h,
        )  # fmt: skip
    shapes: dict[str, tuple[object, ...]] = {
        "fc.weight": (h, KEPT_LAYERS * target),
        "midlayer.self_attn.q_proj.weight": (heads * dim, 2 * h),
        "midlayer.self_attn.k_proj.weight": (kv_heads * dim, 2 * h),
        "midlayer.self_attn.v_proj.weight": (kv_heads * dim, 2 * h),
        "midlayer.self_attn.o_proj.weight": (h, heads * dim),
        "midlayer.mlp.gate_proj.weight": (width, h),
        "midlayer.mlp.up_proj.weight": (width, h),
        "midlayer.mlp.down_proj.weight": (h, width),
        "lm_head.weight": (guessed, h),
    }
    norms = ("midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm")
    shapes |= {f"{norm}.weight": (h,) for norm in norms}
    return shapes | ({_EMBEDDING: (checkpoint.config.get("vocab_size"), h)} if embeds else {})


def _layers(outer: Mapping[str, Any], nested: Mapping[str, Any], checkpoint: Checkpoint, where: str) -> tuple[int, ...]:
    """The layers whose inputs the head reads.

    At the top of config.json the number j means the input of layer j, as in vLLM; in `eagle_config` it means the output
    of layer j, as in SGLang. The authors read the inputs of layers 2, n // 2 and n - 3.
    """
    count = _size(checkpoint.config, "num_hidden_layers", "config.json")
    name = "eagle_aux_hidden_state_layer_ids"
    stated, after = (outer.get(name), 0) if outer.get(name) is not None else (nested.get(name), 1)
    layers = [2, count // 2, count - 3] if stated is None else stated
    good = isinstance(layers, list) and all(isinstance(one, int) and not isinstance(one, bool) for one in layers)
    if not good or len(layers) != KEPT_LAYERS or not 0 <= layers[0] < layers[1] < layers[2] < count - after:
        raise ConfigError(
            f"field {name}", where=f"{where} config.json",
            expected=f"three of the model's {count} layers in their order", found=shown(layers),
        )  # fmt: skip
    return tuple(one + (after if stated is not None else 0) for one in layers)


def _places(to_target: TensorInfo, known: TensorInfo | None, guessed: int, vocab: int, where: str) -> NDArray[np.int32]:
    """`EagleHead.places` from `d2t` int64[guessed], the offset from a token of the head to the model's."""
    if to_target.dtype != "int64" or to_target.shape != (guessed,):
        raise CheckpointError(
            "tensor d2t of the draft head", where=where, expected=f"int64 [{guessed}]",
            found=f"{to_target.dtype} {list(to_target.shape)}",
        )  # fmt: skip
    targets = np.frombuffer(read_bytes(to_target), "<i8").astype(np.int64)
    # Compared before they are added, which could overflow.
    own = np.arange(guessed)
    if (targets < -own).any() or (targets >= vocab - own).any() or (np.diff(targets := targets + own) <= 0).any():
        raise CheckpointError(
            "tensor d2t of the draft head", where=where, expected=f"{guessed} tokens below {vocab} in their order",
            found="others",
        )  # fmt: skip
    places = np.full(vocab, -1, np.int32)
    places[targets] = np.arange(guessed, dtype=np.int32)
    if known is not None:
        there = (known.dtype, known.shape) == ("bool", (vocab,))
        if not there or not np.array_equal(np.frombuffer(read_bytes(known), np.uint8) != 0, places >= 0):
            raise CheckpointError(
                "tensor t2d of the draft head", where=where, expected="the tokens of d2t", found="others"
            )
    return places


def _same(one: TensorInfo, other: TensorInfo | None) -> bool:
    """Whether two tensors are equal in every byte; embeddings are large, so a part at a time."""
    if other is None or (one.dtype, one.shape, one.nbytes) != (other.dtype, other.shape, other.nbytes):
        return False
    parts = range(0, one.nbytes, _PART_BYTES)
    return all(read_bytes(_part(one, begin)) == read_bytes(_part(other, begin)) for begin in parts)


def _part(tensor: TensorInfo, begin: int) -> TensorInfo:
    return replace(tensor, offset=tensor.offset + begin, nbytes=min(_PART_BYTES, tensor.nbytes - begin))


def _object(values: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    value = values.get(name)
    if value is not None and not isinstance(value, dict):
        raise ConfigError(f"field {name}", where=f"{where} config.json", expected="an object", found=shown(value))
    return value or {}


def _size(values: Mapping[str, Any], name: str, where: str, most: int = _MAX_SIZE) -> int:
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ConfigError(f"field {name}", where=where, expected=f"an integer from 1 to {most}", found=shown(value))
    return value
