"""Matrices that a family's safetensors files have as [in, out], as the first program of GPT-2 stored them."""

from __future__ import annotations

from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from mlcpipe.checkpoint.checkpoint import Checkpoint
from mlcpipe.checkpoint.family_names import names_of
from mlcpipe.checkpoint.matrix import FLOAT_DTYPES, Matrix, check_tensor, scales_of
from mlcpipe.checkpoint.quantized import QuantizedCheckpoint
from mlcpipe.checkpoint.quantized_matrix import Parts, widened
from mlcpipe.checkpoint.safetensors_reader import TensorInfo
from mlcpipe.errors import CheckpointError


def upright(checkpoint: Checkpoint) -> Checkpoint:
    """The same checkpoint with these as [out, in]. Raises CheckpointError for one that is not of two axes of floats."""
    ends = tuple(f".{module}.weight" for module in names_of(checkpoint.config).turned)
    if not ends:
        return checkpoint
    tensors = {name: _turned(one) if name.endswith(ends) else one for name, one in checkpoint.tensors.items()}
    return QuantizedCheckpoint(
        checkpoint.path, checkpoint.config, checkpoint.generation_config, MappingProxyType(tensors),
        checkpoint.weight_files, method=checkpoint.quantized_as or "",
    )  # fmt: skip


def _turned(stored: TensorInfo) -> Matrix:
    check_tensor(stored, FLOAT_DTYPES, (*stored.shape, 1, 1)[:2])

    def values() -> NDArray[np.float32]:
        return np.ascontiguousarray(widened(scales_of(stored).T))

    return Matrix(
        stored.name, stored.shape[::-1], stored.dtype, stored.file, stored.offset, stored.nbytes, _no_codes,
        values=values,
    )  # fmt: skip


def _no_codes() -> Parts:
    raise CheckpointError("a matrix of floats has no codes")
