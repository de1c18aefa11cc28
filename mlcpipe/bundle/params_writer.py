"""Streams parameters into `params_shard_*.bin` and their index, one tensor in memory at a time."""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from mlcpipe.bundle.manifest import FileInfo
from mlcpipe.bundle.tensor_cache import ALIGNMENT, ITEM_BYTES, TENSOR_CACHE
from mlcpipe.errors import BundleError
from mlcpipe.support.disk import full_disk_named

DEFAULT_SHARD_BYTES = 32 << 20
"""MLC's published shard size: browsers fetch and cache one shard at a time."""
BLOCK_BYTES = 4 << 20
"""Of a write, at a multiple of it. Linux then keeps the file in pages of 2 MB, which are mapped at once: 530 MB were
touched in 2 ms, else in 70 (Linux 6.18, ext4, AMD EPYC, 2026-11)."""


class ParamsWriter:
    """Writes tensors, in the order they are added, as raw little-endian C-order bytes.

    Every tensor starts at a multiple of 64 bytes and lies in one shard; a tensor larger than
    `max_shard_bytes` gets its own shard. `add` keeps less than a block of 4 MB in memory.

    Format: see `mlcpipe.bundle.tensor_cache`.
    """

    def __init__(self, directory: Path, *, max_shard_bytes: int = DEFAULT_SHARD_BYTES) -> None:
        self._directory = directory
        self._max_shard_bytes = max_shard_bytes
        self._names: set[str] = set()
        self._shards: list[dict[str, Any]] = []
        self._files: dict[str, FileInfo] = {}
        self._open: _OpenShard | None = None
        self._elements = 0
        self._bytes = 0

    def __enter__(self) -> ParamsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open is not None:
            self._open.abandon()
            self._open = None

    def add(self, name: str, array: np.ndarray) -> None:
        """Write one tensor: any shape of positive extents, dtype one of `tensor_cache.ITEM_BYTES`.

        Raises:
            BundleError: a duplicate name, or a dtype or shape that the format does not support.
            ResourceError: the disk is full.
        """
        dtype = array.dtype.name
        if dtype not in ITEM_BYTES:
            raise BundleError(f"cannot store {name}", expected=f"one of {', '.join(ITEM_BYTES)}", found=dtype)
        if array.size == 0 or array.ndim > 8:
            raise BundleError(
                f"cannot store {name}", expected="at least 1 element and at most 8 dimensions", found=array.shape
            )
        if not name or name in self._names:
            raise BundleError("cannot store a tensor", expected="a new name", found=repr(name))
        shard = self._shard_for(array.nbytes)
        # Does not copy an array that is already C-contiguous and little-endian.
        data = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
        offset = shard.append(data)
        shard.records.append(
            {
                "name": name,
                "shape": list(array.shape),
                "dtype": dtype,
                "format": "raw",
                "nbytes": array.nbytes,
                "byteOffset": offset,
            }
        )
        self._names.add(name)
        self._elements += array.size
        self._bytes += array.nbytes

    def finish(self, *, model_params: int | None = None) -> dict[str, FileInfo]:
        """Close the last shard and write the index.

        Args:
            model_params: the model's parameters before quantization, for `BitsPerParam`; by default the
                number of stored elements.

        Returns:
            Size and SHA-256 of every file written, by name, the index last.

        Raises:
            ResourceError: the disk is full.
        """
        self._close_shard()
        count = model_params or self._elements
        metadata = {
            "ParamSize": len(self._names),
            "ParamBytes": self._bytes,
            "BitsPerParam": self._bytes * 8.0 / count if count else 0.0,
        }
        raw = json.dumps({"metadata": metadata, "records": self._shards}, indent=4).encode() + b"\n"
        path = self._directory / TENSOR_CACHE
        with full_disk_named(path):
            path.write_bytes(raw)
        self._files[TENSOR_CACHE] = FileInfo(sha256=hashlib.sha256(raw).hexdigest(), bytes=len(raw))
        return dict(self._files)

    def _shard_for(self, nbytes: int) -> _OpenShard:
        if self._open is not None and _aligned(self._open.nbytes) + nbytes > self._max_shard_bytes:
            self._close_shard()
        if self._open is None:
            self._open = _OpenShard(self._directory / f"params_shard_{len(self._shards)}.bin")
        return self._open

    def _close_shard(self) -> None:
        if self._open is None:
            return
        shard, self._open = self._open, None
        shard.close()
        self._shards.append(
            {
                "dataPath": shard.path.name,
                "format": "raw-shard",
                "nbytes": shard.nbytes,
                "md5sum": shard.md5.hexdigest(),
                "records": shard.records,
            }
        )
        self._files[shard.path.name] = FileInfo(sha256=shard.sha256.hexdigest(), bytes=shard.nbytes)


class _OpenShard:
    """A shard being written, with its running hashes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.nbytes = 0
        self._held = bytearray()  # the beginning of a block
        self.records: list[dict[str, Any]] = []
        self.sha256 = hashlib.sha256()
        # MLC's format requires MD5; it only detects a broken download.
        self.md5 = hashlib.md5(usedforsecurity=False)
        with full_disk_named(path):
            self._file: BinaryIO = path.open("xb")

    def append(self, data: np.ndarray) -> int:
        """Pad to the alignment, write, and return the offset of the first byte."""
        offset = _aligned(self.nbytes)
        self._write(memoryview(bytes(offset - self.nbytes)))
        self._write(data.reshape(-1).view(np.uint8).data)
        return offset

    def _write(self, view: memoryview) -> None:
        self.sha256.update(view)
        self.md5.update(view)
        self.nbytes += len(view)
        with full_disk_named(self.path):
            while len(self._held) + len(view) >= BLOCK_BYTES:
                room = BLOCK_BYTES - len(self._held)
                self._file.write(self._held + view[:room] if self._held else view[:room])
                self._held.clear()
                view = view[room:]
        self._held += view

    def close(self) -> None:
        """Flush and close; a full disk may show up only here."""
        with full_disk_named(self.path), contextlib.closing(self._file):
            self._file.write(self._held)

    def abandon(self) -> None:
        """Close a shard whose content is discarded."""
        try:
            self._file.close()
        except OSError:
            # The flush failed for the reason already reported.
            return


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
