"""Matrices of codes that several stored tensors make up: how methods of quantization read and check them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlcpipe.checkpoint.quantized_matrix import Parts, widened
from mlcpipe.checkpoint.safetensors_reader import TensorInfo, read_bytes
from mlcpipe.errors import CheckpointError
from mlcpipe.support.json_files import shown, shown_path

FLOAT_DTYPES = ("float16", "bfloat16", "float32")
E8M0 = ("uint8", "float8_e8m0fnu")
RUN = 32  # columns that kernels read at once
_SUFFIXES = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}


@dataclass(frozen=True)
class Matrix(TensorInfo):
    """A matrix [N, K] of codes; `dtype` names the scheme that keeps them, `zero` is the code of 0.0.

    `parts` reads it; if they do not give the exact stored numbers, `values` reads those. `file` and `offset` locate its
    codes, `nbytes` is the size of all its tensors. `columns` int32[K] orders the columns by group; None if they are.
    """

    parts: Callable[[], Parts]
    zero: int = 0
    values: Callable[[], NDArray[np.float32]] | None = None
    columns: NDArray[np.int32] | None = None


def words_of(tensor: TensorInfo) -> NDArray[np.uint32]:
    """A stored tensor of 32-bit integers as unsigned words, of its shape."""
    return np.frombuffer(read_bytes(tensor), "<u4").reshape(tensor.shape)


def scales_of(tensor: TensorInfo) -> NDArray[Any]:
    """A stored tensor of scales in its own bits: float16, float32, or uint16 for bfloat16."""
    dtype = {"float16": "<f2", "float32": "<f4", "bfloat16": "<u2"}[tensor.dtype]
    return np.frombuffer(read_bytes(tensor), dtype).reshape(tensor.shape)


def stored_scales(scales: NDArray[Any], scheme: str) -> NDArray[Any]:
    """Scales in the dtype that the scheme's name ends with; those of whole rows are float32, which is exact."""
    return np.ascontiguousarray(widened(scales) if scheme.endswith("_f32") else scales)


def byte_scales(tensor: TensorInfo, scheme: str) -> NDArray[np.int8]:
    """Scales of a byte: those of MXFP4 are e8m0, of NVFP4 e4m3, where negative ones become NaN."""
    scales = np.frombuffer(read_bytes(tensor), np.int8).reshape(tensor.shape)
    if scheme == "MXFP4":
        return scales
    return np.where((scales < 0) | (scales == 127), np.int8(-1), scales)


def nibbles_of(tensor: TensorInfo) -> NDArray[np.uint8]:
    """The codes of 4 bits of stored bytes [..., X], the lower ones first, as [..., 2 X]."""
    pairs = np.frombuffer(read_bytes(tensor), np.uint8).reshape(tensor.shape)
    return np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(*pairs.shape[:-1], -1)


def e4m3_values(numbers: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Numbers of 8 bits with 4 of exponent (e4m3fn) as float32: those of float16 have an exponent 8 higher."""
    halves = ((numbers & 0x80).astype(np.uint16) << 8) | ((numbers & 0x7F).astype(np.uint16) << 7)
    values: NDArray[np.float32] = halves.view(np.float16).astype(np.float32) * np.float32(256)
    values[numbers & 0x7F == 0x7F] = np.nan
    return values


def e8m0_values(numbers: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Powers of two of 8 bits (e8m0) as float32; 255 is NaN."""
    bits = np.maximum(numbers.astype(np.uint32) << np.uint32(23), np.uint32(1 << 22))  # 0 is 2**-127
    bits[numbers == 255] |= np.uint32(1 << 22)
    values: NDArray[np.float32] = bits.view(np.float32)
    return values


def scheme_name(kind: str, bits: int, k: int, groups: int, scales: TensorInfo) -> str:
    """The scheme of integers with these groups of a row and the dtype of the scales. Raises CheckpointError."""
    where = shown_path(scales.file)
    if scales.dtype not in _SUFFIXES:
        raise CheckpointError(f"tensor {shown(scales.name)} has an unsupported dtype", where=where,
                              expected=", ".join(_SUFFIXES), found=scales.dtype)  # fmt: skip
    size = k // groups if groups and k % groups == 0 else 0
    if k % RUN or (size % RUN and size != 16) or not size:
        raise CheckpointError(
            f"the groups of {shown(scales.name)} do not fit", where=where,
            expected="rows of a multiple of 32 columns in equal groups of 16 or a multiple of 32",
            found=f"{k} columns in {groups} groups",
        )  # fmt: skip
    if groups == 1:
        return f"{kind}{bits}_row_f32"
    return f"{kind}{bits}_g{size}_{_SUFFIXES[scales.dtype]}"


def check_tensor(tensor: TensorInfo, dtypes: Iterable[str], shape: tuple[int, ...]) -> None:
    """Raise CheckpointError unless a tensor has one of the dtypes and the shape."""
    known = tuple(dtypes)
    if tensor.dtype not in known or tensor.shape != shape:
        raise CheckpointError(
            f"tensor {shown(tensor.name)} does not fit the matrix", where=shown_path(tensor.file),
            expected=f"{' or '.join(known)} {list(shape)}", found=f"{tensor.dtype} {list(tensor.shape)}",
        )  # fmt: skip


def sibling(tensors: Mapping[str, TensorInfo], module: str, part: str) -> TensorInfo:
    """The tensor `part` of a module. Raises CheckpointError when it is missing."""
    found = tensors.get(f"{module}.{part}")
    if found is None:
        codes = next(tensor for name, tensor in tensors.items() if name.startswith(f"{module}."))
        raise CheckpointError(f"tensor {shown(f'{module}.{part}')} is missing", where=shown_path(codes.file),
                              expected="it beside the codes of this matrix",
                              next_step="download the checkpoint again")  # fmt: skip
    return found


def matrix(
    module: str, shape: tuple[int, int], scheme: str, sources: Iterable[TensorInfo], parts: Callable[[], Parts],
    zero: int = 0,
) -> Matrix:  # fmt: skip
    """The matrix `<module>.weight` of stored tensors, the codes first. Raises CheckpointError if it is empty."""
    first, *rest = sources
    if 0 in shape:  # the other size may be anything
        raise CheckpointError(f"tensor {shown(first.name)} is empty", where=shown_path(first.file), found=list(shape))
    nbytes = first.nbytes + sum(tensor.nbytes for tensor in rest)
    return Matrix(f"{module}.weight", shape, scheme, first.file, first.offset, nbytes, parts, zero)


def sorted_columns(index: TensorInfo, k: int, groups: int) -> NDArray[np.int32] | None:
    """The columns sorted by their group `index` int32[k]; None if they are sorted already.

    Raises CheckpointError unless all groups have as many columns.
    """
    check_tensor(index, ("int32",), (k,))
    found, where = words_of(index).view(np.int32), shown_path(index.file)
    if found.min() < 0 or found.max() >= groups:
        raise CheckpointError(
            f"tensor {shown(index.name)} is out of range", where=where, expected=f"0 to {groups - 1}",
            found=f"{found.min()} to {found.max()}",
        )  # fmt: skip
    if (found == np.arange(k) // (k // groups)).all():
        return None
    counts = np.bincount(found, minlength=groups)
    if (counts != k // groups).any():
        raise CheckpointError(
            f"the groups of {shown(index.name)} have different sizes", where=where,
            expected=f"{k // groups} columns each", found=f"{counts.min()} to {counts.max()}",
        )  # fmt: skip
    return np.argsort(found, kind="stable").astype(np.int32)


def fp8_matrix(module: str, codes: TensorInfo, scales: TensorInfo, block: tuple[int, ...]) -> Matrix:
    """A matrix of e4m3, four a word where they are uint32, with a scale for each block [rows, columns].

    Scales of a byte are e8m0. Its parts are rounded to those of Q8_0.
    """
    n, k = codes.shape[0], codes.shape[1] * (4 if codes.dtype == "uint32" else 1)
    if k % RUN:
        check_tensor(codes, (codes.dtype,), (n, -(-k // RUN) * RUN))

    def values() -> NDArray[np.float32]:
        numbers = e4m3_values(np.frombuffer(read_bytes(codes), np.uint8).reshape(n, k))
        if scales.dtype in E8M0:
            factors = e8m0_values(np.frombuffer(read_bytes(scales), np.uint8))
        else:
            factors = widened(scales_of(scales))
        factors = factors.reshape(-(-n // block[0]), -(-k // block[1]))
        factors = np.repeat(np.repeat(factors, block[0], 0)[:n], block[1], 1)[:, :k]
        with np.errstate(over="ignore"):
            return numbers * factors

    return replace(matrix(module, (n, k), "Q8_0", (codes, scales), lambda: rounded(values())), values=values)


def rounded(values: NDArray[np.float32]) -> Parts:
    """Numbers [N, K] as 8-bit codes with a float16 scale for 32, as Q8_0 has them."""
    groups = values.reshape(len(values), -1, RUN)
    with np.errstate(over="ignore", invalid="ignore"):
        scales = (np.abs(groups).max(-1) / np.float32(127)).astype(np.float16)
        divisors = np.where(scales == 0, np.float32(1), scales.astype(np.float32))
        codes = np.clip(np.rint(groups / divisors[:, :, None]), -127, 127) + np.float32(128)
        return Parts(np.nan_to_num(codes).astype(np.uint8).reshape(values.shape), scales)
