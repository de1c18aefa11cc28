"""Medusa heads: the tensors that guess the tokens after the next one, beside those of the model that they belong to.

Names are those of the authors' `medusa_lm_head.safetensors`, `I.J.linear.weight`, `I.J.linear.bias` and `I.J.weight` of
head I, or the same behind `medusa_head.`: https://github.com/FasterDecoding/Medusa, medusa/model/medusa_model.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from mlcpipe.checkpoint.checkpoint import Checkpoint, open_checkpoint
from mlcpipe.checkpoint.safetensors_reader import TensorInfo, read_header
from mlcpipe.errors import CheckpointError
from mlcpipe.json_files import shown, shown_path

HEAD_FILE = "medusa_lm_head.safetensors"
PREFIX = "medusa_head."  # of the tensors' names in the model
MAX_HEADS, MAX_BLOCKS = 8, 8
_DTYPES = ("float32", "float16", "bfloat16")
_BLOCK = re.compile(r"(\d{1,3})\.(\d{1,3})\.linear\.(?:weight|bias)")


@dataclass(frozen=True)
class DraftHead:
    """So many Medusa heads, each of `blocks` residual blocks and a matrix of logits. `files` hold their tensors."""

    path: Path
    heads: int
    blocks: int
    files: tuple[Path, ...]


def with_draft_head(checkpoint: Checkpoint, folder: Path) -> Checkpoint:
    """The checkpoint with the tensors of the Medusa heads in `folder`, named `medusa_head.I.J…`.

    Raises CheckpointError for a folder without such heads, another dtype, and heads of a model with another hidden size
    or vocabulary. Numbers are checked when they are read.
    """
    tensors, files = _tensors(folder)
    places = [match for name in tensors if (match := _BLOCK.fullmatch(name))]
    heads, blocks = (1 + max((int(place[i]) for place in places), default=-1) for i in (1, 2))
    if not 1 <= heads <= MAX_HEADS or not 1 <= blocks <= MAX_BLOCKS:
        raise CheckpointError(
            "no Medusa heads", where=shown_path(folder),
            expected=f"tensors 0.0.linear.weight, 0.0.linear.bias and 0.1.weight of up to {MAX_HEADS} heads",
            found=", ".join(map(shown, list(tensors)[:3])),
        )  # fmt: skip
    hidden, vocab = (checkpoint.config.get(name) for name in ("hidden_size", "vocab_size"))
    expected: dict[str, tuple[object, ...]] = {}
    for head in range(heads):
        for block in range(blocks):
            expected[f"{head}.{block}.linear.weight"] = hidden, hidden
            expected[f"{head}.{block}.linear.bias"] = (hidden,)
        expected[f"{head}.{blocks}.weight"] = vocab, hidden
    _check(tensors, expected, folder)
    merged = {**checkpoint.tensors, **{PREFIX + name: tensor for name, tensor in tensors.items()}}
    ordered = MappingProxyType(dict(sorted(merged.items())))
    return replace(checkpoint, tensors=ordered, draft_head=DraftHead(folder, heads, blocks, files))


def _tensors(folder: Path) -> tuple[dict[str, TensorInfo], tuple[Path, ...]]:
    """The tensors of a folder by their names without a prefix, and its files."""
    if (folder / HEAD_FILE).is_file():
        files: tuple[Path, ...] = (folder / HEAD_FILE,)
        tensors = {tensor.name: tensor for tensor in read_header(*files)}
    else:
        opened = open_checkpoint(folder)
        files, tensors = opened.weight_files, dict(opened.tensors)
    return {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}, files


def _check(tensors: Mapping[str, TensorInfo], expected: Mapping[str, tuple[object, ...]], folder: Path) -> None:
    where = shown_path(folder)
    for name, shape in expected.items():
        tensor = tensors.get(name)
        if tensor is None:
            raise CheckpointError(f"tensor {shown(name)} of the draft head is missing", where=where)
        if tensor.shape != shape or tensor.dtype not in _DTYPES:
            raise CheckpointError(
                f"tensor {shown(name)} of the draft head is of another model", where=where,
                expected=f"{list(shape)} of {' or '.join(_DTYPES)}", found=f"{list(tensor.shape)} of {tensor.dtype}",
                next_step="take the head that was trained for this model",
            )  # fmt: skip
    left = sorted(tensors.keys() - expected.keys())
    if left:
        raise CheckpointError(
            f"tensor {shown(left[0])} of the draft head would not be used", where=where,
            expected=f"{len(expected)} tensors", found=len(tensors),
        )  # fmt: skip
