"""A file of tables to map, read by `mlcpipe/native/runtime/tables.h`."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_ALIGN = 8


def tables(kind: bytes, version: int, sections: Sequence[bytes | NDArray[Any]]) -> bytes:
    """The file: an arrays' section is its elements, little-endian.

    Header: `kind` in 8 bytes, version and number of sections as u32, then offset and length of each section as u64.
    """
    if len(kind) != 8:
        raise ValueError(f"a kind of 8 bytes, not {kind!r}")
    contents = [part if isinstance(part, bytes) else _little_endian(part) for part in sections]
    header = struct.Struct(f"<8sII{2 * len(contents)}Q")
    places, file = [], bytearray(header.size)
    for content in contents:
        file += bytes(-len(file) % _ALIGN)
        places += [len(file), len(content)]
        file += content
    header.pack_into(file, 0, kind, version, len(contents), *places)
    return bytes(file)


def strings(texts: Iterable[bytes]) -> tuple[NDArray[np.uint32], bytes]:
    """Two sections: the end of each string, and the concatenated strings."""
    several = list(texts)
    ends = np.cumsum([len(text) for text in several], dtype=np.uint64)
    if len(several) and ends[-1] >= 1 << 32:
        raise ValueError("4 GiB of strings")
    return ends.astype(np.uint32), b"".join(several)


def _little_endian(array: NDArray[Any]) -> bytes:
    return np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
