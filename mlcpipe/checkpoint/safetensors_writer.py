"""Writes one safetensors file, a tensor at a time; the format is in `safetensors_reader`.

The header comes first and locates the data, but is complete only at the end, so its space is reserved: the format
allows spaces after the JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from mlcpipe.checkpoint.safetensors_reader import DTYPES, TensorInfo
from mlcpipe.errors import CheckpointError
from mlcpipe.support.json_files import shown

_METADATA = {"__metadata__": {"format": "pt"}}  # required by old versions of transformers
_LONGEST = 1 << 62  # no extent or offset has more digits
_NAMES = {dtype: name for name, (dtype, _) in DTYPES.items()}


class SafetensorsWriter:
    """Writes the tensors `like`, or some of them, to `file`, which is empty: names and shapes may differ, ranks not."""

    def __init__(self, file: BinaryIO, like: Iterable[TensorInfo]) -> None:
        self._file, self._header, self._end = file, dict[str, Any](_METADATA), 0
        longest = {one.name: _entry(one.dtype, (_LONGEST,) * len(one.shape), _LONGEST, _LONGEST) for one in like}
        self._room = -(-len(json.dumps(_METADATA | longest)) // 8) * 8
        file.write(self._room.to_bytes(8, "little") + b" " * self._room)

    def add(self, name: str, dtype: str, shape: tuple[int, ...], data: memoryview) -> None:
        """Write the bytes of one tensor, C-contiguous: those of `narrowed(...).data`, or `Checkpoint.read_raw`."""
        self._file.write(data)
        self._header[name] = _entry(dtype, shape, self._end, self._end + data.nbytes)
        self._end += data.nbytes

    def finish(self) -> None:
        """Write the header."""
        raw = json.dumps(self._header).encode()
        assert len(raw) <= self._room
        self._file.seek(8)
        self._file.write(raw)


def _entry(dtype: str, shape: tuple[int, ...], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}


def narrowed(values: NDArray[np.float32], dtype: str, name: str) -> NDArray[Any]:
    """Finite numbers rounded to float32, float16 or bfloat16, whose bits are uint16; halves go to the even neighbour.

    Raises CheckpointError for one that is too large.
    """
    if dtype == "float32":
        return np.ascontiguousarray(values, np.dtype("<f4"))
    if dtype == "float16":
        with np.errstate(over="ignore"):
            found: NDArray[Any] = np.ascontiguousarray(values, np.dtype("<f2"))
        finite = bool(np.isfinite(found).all())
    else:
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        found = ((bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16).astype("<u2")
        finite = not bool(((found & 0x7F80) == 0x7F80).any())
    if not finite:
        largest = float(np.abs(values).max())
        raise CheckpointError(f"tensor {shown(name)} does not fit {dtype} any more", found=f"{largest:g}")
    return found
