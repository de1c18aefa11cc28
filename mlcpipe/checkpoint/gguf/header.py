"""A strict reader for the header of one GGUF file, version 2 or 3, little-endian.

Format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): the magic `GGUF`, u32 version, u64 number of
tensors, u64 number of key-value pairs, the pairs; for each tensor a name, u32 rank, u64 extents with the fastest first,
u32 type and u64 offset into the data. The data begin at the next multiple of `general.alignment` (32 if absent), and so
does each tensor; the tensors cover the data exactly.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from math import prod
from pathlib import Path

from mlcpipe.checkpoint.gguf.blocks import FORMATS
from mlcpipe.checkpoint.gguf.metadata import MAX_KEY_BYTES, MAX_PAIRS, HeaderReader, Metadata, Value
from mlcpipe.checkpoint.safetensors_reader import MAX_DIMENSION, MAX_NAME_CHARACTERS, MAX_TENSORS, TensorInfo
from mlcpipe.errors import CheckpointError
from mlcpipe.support.files import LFS_ADVICE, LFS_START, file_size
from mlcpipe.support.json_files import shown, shown_path

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT_KEY = "general.alignment"
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
MAX_RANK = 4

# Type in the file -> (dtype, elements of a block, bytes of a block).
_PLAIN = {
    0: ("float32", 1, 4),
    1: ("float16", 1, 2),
    24: ("int8", 1, 1),
    25: ("int16", 1, 2),
    26: ("int32", 1, 4),
    27: ("int64", 1, 8),
    28: ("float64", 1, 8),
    30: ("bfloat16", 1, 2),
}
TYPES = _PLAIN | {form.code: (form.name, form.elements, form.nbytes) for form in FORMATS.values()}


@dataclass(frozen=True)
class Header:
    """The metadata of one file, and its tensors in data order; shapes have the slowest extent first."""

    metadata: Metadata
    tensors: tuple[TensorInfo, ...]


def read_header(path: Path) -> Header:
    """Metadata and tensors of the file. Raises CheckpointError unless the file is well formed."""
    size = file_size(path, CheckpointError)
    try:
        with path.open("rb", buffering=0) as file:
            return parse_header(file, size, path)
    except OSError as error:
        raise CheckpointError("cannot read a GGUF file", where=shown_path(path), found=error) from error


def is_gguf(path: Path) -> bool:
    """Whether `path` is a regular file that begins with GGUF's magic."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def parse_header(file: io.RawIOBase, size: int, path: Path) -> Header:
    """As `read_header`, of a file of `size` bytes that is read from its start."""
    reader = HeaderReader(file, size, shown_path(path))
    magic = reader.take(4)
    if magic == LFS_START[:4]:
        raise CheckpointError("a pointer of Git LFS, not the model", where=reader.where, next_step=LFS_ADVICE)
    if magic != MAGIC:
        raise reader.error("not a GGUF file", MAGIC.decode(), shown(magic))
    version = reader.u32()
    if version not in VERSIONS:
        big = version & 0xFFFF == 0 and version >> 24 in VERSIONS
        raise reader.error(
            "unsupported version of GGUF", "2 or 3, little-endian", "a big-endian file" if big else version
        )
    count, pairs = reader.u64(), reader.u64()
    if count > MAX_TENSORS or pairs > MAX_PAIRS:
        raise reader.error(
            "too many tensors or keys in the GGUF header", f"at most {MAX_TENSORS} and {MAX_PAIRS}", f"{count}, {pairs}"
        )
    values: dict[str, Value] = {}
    for _ in range(pairs):
        key = reader.name(MAX_KEY_BYTES)
        if key in values:
            raise reader.error(f"key {shown(key)} is stored twice")
        values[key] = reader.value()
    metadata = Metadata(values, reader.where)
    alignment = metadata.integer(ALIGNMENT_KEY, DEFAULT_ALIGNMENT)
    if not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise reader.error(f"bad {ALIGNMENT_KEY}", f"a power of two up to {MAX_ALIGNMENT}", alignment)
    entries = [_entry(reader) for _ in range(count)]
    start = _aligned(reader.at, alignment)
    tensors = [TensorInfo(name, shape, dtype, path, start + at, nbytes) for name, shape, dtype, at, nbytes in entries]
    if len({tensor.name for tensor in tensors}) != count:
        raise reader.error("a tensor is stored twice", "each name once")
    tensors.sort(key=lambda tensor: tensor.offset)
    _check_cover(reader, tensors, start, size, alignment)
    return Header(metadata, tuple(tensors))


def _entry(reader: HeaderReader) -> tuple[str, tuple[int, ...], str, int, int]:
    """Name, shape, dtype, offset into the data, and bytes of the next tensor."""
    name = reader.name(MAX_NAME_CHARACTERS)
    what, rank = f"tensor {shown(name)}", reader.u32()
    if not 1 <= rank <= MAX_RANK:
        raise reader.error(f"{what} has a bad rank", f"1 to {MAX_RANK}", rank)
    shape = tuple(reversed([reader.u64() for _ in range(rank)]))
    if not all(0 < extent <= MAX_DIMENSION for extent in shape):
        raise reader.error(f"{what} has a bad shape", f"extents of 1 to {MAX_DIMENSION}", shown(shape))
    code, offset = reader.u32(), reader.u64()
    if code not in TYPES:
        raise reader.error(f"{what} has an unknown type", "a type of GGUF's that llama.cpp reads", code)
    dtype, elements, nbytes = TYPES[code]
    if shape[-1] % elements:
        raise reader.error(f"{what} has a bad row", f"a multiple of {elements} elements for {dtype}", shape[-1])
    return name, shape, dtype, offset, prod(shape) // elements * nbytes


def _aligned(at: int, alignment: int) -> int:
    return -(-at // alignment) * alignment


def _check_cover(reader: HeaderReader, tensors: list[TensorInfo], start: int, size: int, alignment: int) -> None:
    """The tensors must cover the data exactly, padding aside: a gap could hide data."""
    end, previous = start, "the header"
    for tensor in tensors:
        what = f"tensor {shown(tensor.name)}"
        expected = _aligned(end, alignment)
        if tensor.offset != expected:
            problem = f"{what} overlaps {previous}" if tensor.offset < end else f"a gap between {previous} and {what}"
            raise reader.error(problem, f"an offset of {expected - start}", tensor.offset - start)
        end, previous = tensor.offset + tensor.nbytes, what
        if end > size:
            raise reader.error("truncated GGUF file", f"{end} bytes, the end of {what}", size)
    if tensors and size > _aligned(end, alignment):
        raise reader.error("bytes after the last tensor", f"at most {_aligned(end, alignment)} bytes", size)
