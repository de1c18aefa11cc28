"""A strict reader for one safetensors file: checks the header, reads one tensor at a time as float32.

Format (https://github.com/huggingface/safetensors, README "Format"): u64 little-endian header length N,
N bytes of JSON beginning with `{` and possibly padded with spaces, then the data. The JSON maps a name to
`{"dtype", "shape", "data_offsets": [begin, end]}` (relative to the data) and may hold `__metadata__`, text to
text. The data are row-major, little-endian, and the tensors cover them exactly: no overlap, hole or tail.

The safetensors package is not used: its numpy front end has no bfloat16, it maps the whole file (truncating
a mapped file kills the process), and its errors name neither the file nor the tensor.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlcpipe.errors import CheckpointError, ResourceError
from mlcpipe.support.files import LFS_ADVICE, LFS_START, file_size
from mlcpipe.support.json_files import parse_json_object, shown, shown_path

MAX_HEADER_BYTES = 32 << 20
MAX_TENSORS = 100_000  # in one file; the largest checkpoints have 140,000 in hundreds of files
_MAX_VALUES = 16 * MAX_TENSORS  # of the header's JSON: a tensor has its name, three fields, extents and two offsets
MAX_RANK = 8
MAX_DIMENSION = 2**40  # far above any tensor, far below the overflow of an int64 index
MAX_NAME_CHARACTERS = 1024
CHUNK_ELEMENTS = 256 * 1024  # 1 MiB of float32: stays in the L2 cache while it is widened and checked

# Name in the file -> (numpy-like name, bits per element).
DTYPES = {
    "BOOL": ("bool", 8),
    "F4": ("float4_e2m1fn", 4),
    "F6_E2M3": ("float6_e2m3fn", 6),
    "F6_E3M2": ("float6_e3m2fn", 6),
    "U8": ("uint8", 8),
    "I8": ("int8", 8),
    "F8_E5M2": ("float8_e5m2", 8),
    "F8_E4M3": ("float8_e4m3fn", 8),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 8),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 8),
    "F8_E8M0": ("float8_e8m0fnu", 8),
    "I16": ("int16", 16),
    "U16": ("uint16", 16),
    "F16": ("float16", 16),
    "BF16": ("bfloat16", 16),
    "I32": ("int32", 32),
    "U32": ("uint32", 32),
    "F32": ("float32", 32),
    "C64": ("complex64", 64),
    "F64": ("float64", 64),
    "I64": ("int64", 64),
    "U64": ("uint64", 64),
}


@dataclass(frozen=True)
class TensorInfo:
    """Location of one tensor. `offset` counts bytes from the start of `file`; `dtype` is as in ml_dtypes.

    `turned`: the file has the matrix of `shape` with its axes exchanged.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: Path
    offset: int
    nbytes: int
    turned: bool = field(default=False, kw_only=True)


def read_header(path: Path) -> tuple[TensorInfo, ...]:
    """All tensors of the file, in data order. Raises CheckpointError unless the file is well formed."""
    size = file_size(path, CheckpointError, "weight file", "download the checkpoint again")
    where = shown_path(path)
    try:
        with path.open("rb") as file:
            prefix = file.read(8)
            if len(prefix) < 8:
                raise _truncated(where, "at least 8 bytes", size)
            if prefix == LFS_START[:8]:
                raise CheckpointError("a pointer of Git LFS, not the weights", where=where, next_step=LFS_ADVICE)
            (length,) = struct.unpack("<Q", prefix)
            if length > MAX_HEADER_BYTES:
                raise CheckpointError(
                    "safetensors header too long",
                    where=where,
                    expected=f"at most {MAX_HEADER_BYTES} bytes",
                    found=f"{length} bytes; is this a safetensors file?",
                )
            if 8 + length > size:
                raise _truncated(where, f"{8 + length} bytes for the header", size)
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError("cannot read a shard", where=where, found=error) from error
    if not raw.startswith(b"{"):
        raise CheckpointError("not a safetensors header", where=where, expected="a JSON object", found=shown(raw[:16]))
    header = parse_json_object(raw, where=f"the header of {where}", error=CheckpointError, max_values=_MAX_VALUES)
    _check_metadata(header.pop("__metadata__", {}), where)
    if len(header) > MAX_TENSORS:
        found = f"{len(header)}"
        raise CheckpointError("too many tensors", where=where, expected=f"at most {MAX_TENSORS} in a file", found=found)
    start = 8 + length
    tensors = [_tensor_info(name, entry, path, start) for name, entry in header.items()]
    # An empty tensor sorts before the tensor at the same offset.
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.nbytes))
    _check_cover(tensors, start, size, where)
    return tuple(tensors)


def read_float32(info: TensorInfo) -> NDArray[np.float32]:
    """One tensor as a new C-contiguous float32 array of `info.shape`, exactly widened from 16 bits.

    Private memory: the result and about 2 MiB. Raises CheckpointError for another dtype, a file that was
    truncated, NaN or Inf (naming the first), and ResourceError when memory is exhausted.
    """
    where = shown_path(info.file)
    if info.dtype not in ("bfloat16", "float16", "float32"):
        raise CheckpointError(
            f"tensor {shown(info.name)} has an unsupported dtype",
            where=where,
            expected="bfloat16, float16 or float32",
            found=info.dtype,
            next_step="save the checkpoint in one of these (transformers: model.to(torch.bfloat16))",
        )
    if info.turned:
        stored = replace(info, shape=info.shape[::-1], turned=False)
        return np.ascontiguousarray(read_chunks(stored, _widen).T)
    return read_chunks(info, _widen)


def read_chunks(
    info: TensorInfo, chunks: Callable[[io.RawIOBase, TensorInfo, NDArray[np.float32]], Iterator[tuple[int, int]]]
) -> NDArray[np.float32]:
    """One tensor as a new float32 array, filled by `chunks`, which reads the file from the tensor's offset on.

    `chunks` fills its flat array in order and yields the bounds of each chunk. Raises CheckpointError for NaN or Inf
    and ResourceError when memory is exhausted.
    """
    where = shown_path(info.file)
    try:
        result = np.empty(info.shape, np.float32)
    except MemoryError as error:
        raise ResourceError(
            f"not enough memory for tensor {shown(info.name)}",
            where=where,
            expected=f"{4 * prod(info.shape)} free bytes",
            next_step="free memory or use a smaller model",
        ) from error
    flat = result.reshape(-1)
    try:
        with info.file.open("rb", buffering=0) as file:
            file.seek(info.offset)
            for begin, end in chunks(file, info, flat):
                if not np.isfinite(flat[begin:end]).all():
                    raise _not_finite(info, flat, begin, end)
    except OSError as error:
        raise CheckpointError(f"cannot read tensor {shown(info.name)}", where=where, found=error) from error
    return result


def read_bytes(info: TensorInfo) -> memoryview:
    """The stored bytes of one tensor, of any dtype, read-only. Raises CheckpointError."""
    raw = bytearray(info.nbytes)
    try:
        with info.file.open("rb", buffering=0) as file:
            file.seek(info.offset)
            fill(file, memoryview(raw), info)
    except OSError as error:
        raise CheckpointError(
            f"cannot read tensor {shown(info.name)}", where=shown_path(info.file), found=error
        ) from error
    return memoryview(raw).toreadonly()


def _widen(file: io.RawIOBase, info: TensorInfo, flat: NDArray[np.float32]) -> Iterator[tuple[int, int]]:
    """Fills `flat` a chunk at a time from `file` and yields the bounds of each chunk."""
    halves = np.empty(0 if info.dtype == "float32" else min(CHUNK_ELEMENTS, flat.size), "<u2")
    bits = flat.view(np.uint32)
    for begin in range(0, flat.size, CHUNK_ELEMENTS):
        end = min(begin + CHUNK_ELEMENTS, flat.size)
        if info.dtype == "float32":
            fill(file, flat[begin:end].data.cast("B"), info)
        else:
            chunk = halves[: end - begin]
            fill(file, chunk.data.cast("B"), info)
            if info.dtype == "float16":
                flat[begin:end] = chunk.view("<f2")
            else:  # a bfloat16 is the upper half of the float32 with the same value
                np.left_shift(chunk, 16, out=bits[begin:end], dtype=np.uint32)
        yield begin, end


def fill(file: io.RawIOBase, target: memoryview, info: TensorInfo) -> None:
    """Read `target` full from where `file` stands. Raises CheckpointError if the file ends before."""
    done = 0
    while done < len(target):
        count = file.readinto(target[done:])
        if not count:
            raise CheckpointError(
                f"the file ends inside tensor {shown(info.name)}",
                where=shown_path(info.file),
                expected=f"{info.nbytes} bytes at offset {info.offset}",
                found=f"end of file at {file.tell()}: the file changed since it was opened",
                next_step="download the shard again",
            )
        done += count


def _not_finite(info: TensorInfo, flat: NDArray[np.float32], begin: int, end: int) -> CheckpointError:
    first = begin + int(np.argmin(np.isfinite(flat[begin:end])))
    index = [int(i) for i in np.unravel_index(first, info.shape)] if info.shape else []
    return CheckpointError(
        f"tensor {shown(info.name)} is not finite",
        where=shown_path(info.file),
        expected="numbers only",
        found=f"{flat[first]} at index {index}",
        next_step="the checkpoint is damaged or its training diverged; take another revision",
    )


def _truncated(where: str, expected: str, size: int) -> CheckpointError:
    return CheckpointError(
        "truncated safetensors file",
        where=where,
        expected=expected,
        found=f"{size} bytes",
        next_step="download the shard again",
    )


def _check_metadata(metadata: Any, where: str) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError("bad __metadata__", where=where, expected="an object of strings")


def _is_list_of_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def check_name(name: str, where: str) -> str:
    """`name` if it can name a tensor; CheckpointError for an empty, too long or unprintable one."""
    if not 0 < len(name) <= MAX_NAME_CHARACTERS or not name.isprintable():
        raise CheckpointError(
            f"bad tensor name {shown(name)}",
            where=where,
            expected=f"1 to {MAX_NAME_CHARACTERS} printable characters",
        )
    return name


def _tensor_info(name: str, entry: Any, path: Path, start: int) -> TensorInfo:
    where = shown_path(path)
    what = f"tensor {shown(check_name(name, where))}"
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise CheckpointError(
            f"{what} has an incomplete entry",
            where=where,
            expected="dtype, shape and data_offsets",
            found=shown(entry),
        )
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(
            f"{what} has an unknown dtype", where=where, expected="a safetensors dtype", found=shown(dtype)
        )
    if not _is_list_of_sizes(shape) or len(shape) > MAX_RANK or any(size > MAX_DIMENSION for size in shape):
        raise CheckpointError(
            f"{what} has a bad shape",
            where=where,
            expected=f"up to {MAX_RANK} dimensions of 0 to {MAX_DIMENSION}",
            found=shown(shape),
        )
    if not _is_list_of_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(
            f"{what} has bad data_offsets", where=where, expected="[begin, end]", found=shown(offsets)
        )
    named, bits = DTYPES[dtype]
    nbytes = offsets[1] - offsets[0]
    if prod(shape) * bits != nbytes * 8:
        raise CheckpointError(
            f"{what} has the wrong size",
            where=where,
            expected=f"{prod(shape) * bits / 8:.0f} bytes for {named}{shape}",
            found=f"{nbytes} bytes in data_offsets",
        )
    return TensorInfo(name, tuple(shape), named, path, start + offsets[0], nbytes)


def _check_cover(tensors: list[TensorInfo], start: int, size: int, where: str) -> None:
    """The tensors must cover the data exactly: a gap could hide data."""
    end, previous = start, "the header"
    for tensor in tensors:
        what = f"tensor {shown(tensor.name)}"
        if tensor.offset < end:
            raise CheckpointError(
                f"{what} overlaps {previous}",
                where=where,
                expected=f"an offset of {end - start}",
                found=f"{tensor.offset - start}",
            )
        if tensor.offset > end:
            raise CheckpointError(
                f"unused bytes between {previous} and {what}",
                where=where,
                expected=f"an offset of {end - start}",
                found=f"{tensor.offset - start}",
            )
        end, previous = tensor.offset + tensor.nbytes, what
        if end > size:
            raise _truncated(where, f"{end} bytes, the end of {what}", size)
    if end != size:
        raise CheckpointError(
            "bytes after the last tensor", where=where, expected=f"{end} bytes", found=f"{size} bytes"
        )
