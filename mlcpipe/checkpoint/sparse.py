"""2:4 sparse matrices, which store two of each four columns: sparse-24-bitmask of compressed-tensors.

A matrix [N, K]: `compressed` [N, K / 2] has the two numbers of each four columns in their order, `bitmask`
uint8[N, K / 8] a bit for each column, the lowest first, `shape` int64[2, 1] is N and K. It is read as a dense one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from mlcpipe.checkpoint.matrix import FLOAT_DTYPES, Matrix, check_tensor, matrix, scales_of, sibling
from mlcpipe.checkpoint.quantized_matrix import Parts, widened
from mlcpipe.checkpoint.safetensors_reader import TensorInfo, read_bytes
from mlcpipe.errors import CheckpointError
from mlcpipe.support.json_files import shown, shown_path

SPARSE_PARTS = ("compressed", "bitmask", "shape")


def sparse_matrix(tensors: Mapping[str, TensorInfo], module: str) -> Matrix:
    """The matrix `<module>.weight` of floats. Raises CheckpointError where its tensors do not fit."""
    numbers, bits, shape = (sibling(tensors, module, part) for part in SPARSE_PARTS)
    n, k = matrix_shape(shape)
    if k % 8:
        raise CheckpointError(f"tensor {shown(shape.name)} is of no sparse matrix", where=shown_path(shape.file),
                              expected="a multiple of 8 columns", found=k)  # fmt: skip
    check_tensor(numbers, FLOAT_DTYPES, (n, k // 2))
    check_tensor(bits, ("uint8",), (n, k // 8))

    def values() -> NDArray[np.float32]:
        mask = np.unpackbits(np.frombuffer(read_bytes(bits), np.uint8), bitorder="little").astype(bool)
        counts = mask.reshape(-1, 4).sum(-1)
        if (counts != 2).any():
            raise CheckpointError(
                f"tensor {shown(bits.name)} does not fit the numbers", where=shown_path(bits.file),
                expected="two of each four columns", found=f"{counts.min()} to {counts.max()}",
            )  # fmt: skip
        dense = np.zeros(n * k, np.float32)
        dense[mask] = widened(scales_of(numbers)).reshape(-1)
        return dense.reshape(n, k)

    def parts() -> Parts:
        raise CheckpointError(f"tensor {shown(numbers.name)} has no codes", where=shown_path(numbers.file))

    return replace(matrix(module, (n, k), numbers.dtype, (numbers, bits), parts), values=values)


def matrix_shape(stored: TensorInfo) -> tuple[int, int]:
    """The shape [N, K] in a tensor of two integers. Raises CheckpointError for an impossible one."""
    if stored.dtype not in ("int64", "int32") or stored.shape not in ((2,), (2, 1)):
        check_tensor(stored, ("int64",), (2,))
    n, k = (int(size) for size in np.frombuffer(read_bytes(stored), "<i8" if stored.dtype == "int64" else "<i4"))
    if not (0 < n < 1 << 24 and 0 < k < 1 << 24):
        raise CheckpointError(f"tensor {shown(stored.name)} is not the shape of a matrix",
                              where=shown_path(stored.file), found=f"[{n}, {k}]")  # fmt: skip
    return n, k
