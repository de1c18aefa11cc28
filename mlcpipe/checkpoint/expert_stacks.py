"""Matrices and biases of single experts, out of tensors that have those of all experts (gpt-oss).

`gate_up_proj` [experts, hidden, 2 * width] and `down_proj` [experts, width, hidden] have inputs as rows; gate and up
take turns as columns. `gate_up_proj_bias` is [experts, 2 * width], `down_proj_bias` [experts, hidden].
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from mlcpipe.checkpoint.checkpoint import Checkpoint
from mlcpipe.checkpoint.matrix import FLOAT_DTYPES, Matrix, check_tensor, scales_of
from mlcpipe.checkpoint.parts import Parts, widened
from mlcpipe.checkpoint.quantized import QuantizedCheckpoint
from mlcpipe.checkpoint.safetensors_reader import TensorInfo
from mlcpipe.errors import CheckpointError
from mlcpipe.json_files import shown, shown_path

MAX_EXPERTS = 4096
MAX_TENSORS = 400_000  # of experts; gpt-oss-120b has 27,648
# The modules of an expert that a stacked one has the rows of: those from `first` on, every `step`-th.
PARTS: Mapping[str, tuple[str, ...]] = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_FAMILY = "gpt_oss"
_NAME = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)(_bias)?")


def unstacked(checkpoint: Checkpoint) -> Checkpoint:
    """The same checkpoint, with a tensor for each expert. Raises CheckpointError for a stack of another form."""
    if checkpoint.config.get("model_type") != _FAMILY:
        return checkpoint
    stacks = {name: match for name in checkpoint.tensors if (match := _NAME.fullmatch(name))}
    tensors = {name: tensor for name, tensor in checkpoint.tensors.items() if name not in stacks}
    for name, (module, projection, bias) in ((name, match.groups()) for name, match in stacks.items()):
        check_number(len(tensors), checkpoint.tensors[name])
        for tensor in _experts(checkpoint.tensors[name], module, projection, bool(bias)):
            if tensors.setdefault(tensor.name, tensor) is not tensor:
                raise CheckpointError(f"tensor {shown(tensor.name)} is stored twice", where=shown_path(tensor.file))
    ordered = MappingProxyType(dict(sorted(tensors.items())))
    return QuantizedCheckpoint(
        checkpoint.path, checkpoint.config, checkpoint.generation_config, ordered, checkpoint.weight_files,
        method=checkpoint.quantized_as or "",
    )  # fmt: skip


def check_experts(tensor: TensorInfo, rank: int, parts: int, axis: int) -> None:
    """Raise CheckpointError unless a stack has `rank` axes, some experts, and `parts` that take turns along `axis`."""
    shape = tensor.shape
    if len(shape) != rank or 0 in shape or shape[0] > MAX_EXPERTS or shape[axis] % parts:
        raise CheckpointError(
            f"tensor {shown(tensor.name)} is no stack of experts", where=shown_path(tensor.file),
            expected=f"{rank} axes, 1 to {MAX_EXPERTS} experts" + (f", axis {axis} even" if parts == 2 else ""),
            found=list(shape),
        )  # fmt: skip


def check_number(count: int, stack: TensorInfo) -> None:
    """Raise CheckpointError if there are so many tensors of experts that their list would fill the memory."""
    if count > MAX_TENSORS:
        raise CheckpointError(
            "too many experts", where=shown_path(stack.file), expected=f"at most {MAX_TENSORS} tensors"
        )


def part_of(tensor: TensorInfo, expert: int) -> TensorInfo:
    """Where the part of an expert is in a stack."""
    nbytes = tensor.nbytes // tensor.shape[0]
    return replace(tensor, shape=tensor.shape[1:], offset=tensor.offset + expert * nbytes, nbytes=nbytes)


def _experts(stack: TensorInfo, module: str, projection: str, bias: bool) -> Iterator[Matrix]:
    """The tensors of each expert."""
    parts = PARTS[projection]
    check_experts(stack, 2 if bias else 3, len(parts), -1)
    check_tensor(stack, FLOAT_DTYPES, stack.shape)
    rows = stack.shape[-1] // len(parts)
    shape = (rows,) if bias else (rows, stack.shape[1])
    suffix = "bias" if bias else "weight"
    for expert in range(stack.shape[0]):
        part = part_of(stack, expert)
        for first, name in enumerate(parts):
            yield Matrix(
                f"{module}.{expert}.{name}.{suffix}", shape, stack.dtype, part.file, part.offset,
                part.nbytes // len(parts), _no_codes, values=_Rows(part, first, len(parts)),
            )  # fmt: skip


class _Rows:
    """Reads the rows of an expert's module: every `step`-th column of what is stored."""

    def __init__(self, stored: TensorInfo, first: int, step: int) -> None:
        self.stored, self.first, self.step = stored, first, step

    def __call__(self) -> NDArray[np.float32]:
        stored = scales_of(self.stored)
        return np.ascontiguousarray(widened(stored[..., self.first :: self.step].T))


def _no_codes() -> Parts:
    raise CheckpointError("a stack of experts has no codes")
