"""The files of a draft head, and the checks that all kinds of heads share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlcpipe.checkpoint.open import open_checkpoint
from mlcpipe.checkpoint.safetensors_reader import TensorInfo, read_header
from mlcpipe.errors import CheckpointError
from mlcpipe.support.json_files import shown, shown_path

MEDUSA_FILE = "medusa_lm_head.safetensors"
DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class HeadFiles:
    """A folder's tensors by their names there; `config` is {} if it has none."""

    path: Path
    files: tuple[Path, ...]
    tensors: Mapping[str, TensorInfo]
    config: Mapping[str, Any]


def open_head(folder: Path) -> HeadFiles:
    """Read the headers. Raises CheckpointError and ConfigError, as `open_checkpoint` does."""
    if (folder / MEDUSA_FILE).is_file():
        files = (folder / MEDUSA_FILE,)
        return HeadFiles(folder, files, {tensor.name: tensor for tensor in read_header(*files)}, {})
    opened = open_checkpoint(folder)
    return HeadFiles(folder, opened.weight_files, opened.tensors, opened.config)


def check_tensors(tensors: Mapping[str, TensorInfo], expected: Mapping[str, tuple[object, ...]], folder: Path) -> None:
    """Raise CheckpointError unless the tensors are those of `expected`, with these shapes."""
    where = shown_path(folder)
    for name, shape in expected.items():
        tensor = tensors.get(name)
        if tensor is None:
            raise CheckpointError(f"tensor {shown(name)} of the draft head is missing", where=where)
        if tensor.shape != shape or tensor.dtype not in DTYPES:
            raise CheckpointError(
                f"tensor {shown(name)} of the draft head is of another model", where=where,
                expected=f"{list(shape)} of {' or '.join(DTYPES)}", found=f"{list(tensor.shape)} of {tensor.dtype}",
                next_step="take the head that was trained for this model",
            )  # fmt: skip
    left = sorted(tensors.keys() - expected.keys())
    if left:
        raise CheckpointError(
            f"tensor {shown(left[0])} of the draft head would not be used", where=where,
            expected=f"{len(expected)} tensors", found=len(tensors),
        )  # fmt: skip
