"""Parameters of a bundle as read-only views of memory-mapped shards, without copies or private memory."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from mlcpipe.bundle.manifest import Manifest
from mlcpipe.bundle.tensor_cache import ALIGNMENT, RECOMPILE, ShardRecord, TensorCache, read_tensor_cache
from mlcpipe.errors import BundleError, ResourceError

if TYPE_CHECKING:
    import tvm_ffi

Preload = Literal["none", "willneed", "populate"]


class Params(Mapping[str, np.ndarray]):
    """Name -> read-only array, in the order of the index. Each array starts at a multiple of 64 bytes.

    An array keeps its shard mapped, so it may outlive this object. Never truncate a mapped shard: the next
    access raises SIGBUS. Replace a bundle by renaming directories.
    """

    def __init__(self, arrays: dict[str, np.ndarray], metadata: Mapping[str, object]) -> None:
        self._arrays = arrays
        self.metadata = metadata
        self.nbytes = sum(array.nbytes for array in arrays.values())

    def __getitem__(self, name: str) -> np.ndarray:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


def open_params(directory: Path, manifest: Manifest | None, *, preload: Preload = "none") -> Params:
    """Map the shards of `directory` and view every tensor of `tensor-cache.json`.

    Args:
        directory: the bundle.
        manifest: if given, names, shapes and dtypes must match `manifest.params`, and sizes of shards must
            match `manifest.files`.
        preload: "none" reads pages when they are touched; "willneed" asks the kernel to read ahead in the
            background; "populate" reads everything before returning (Linux; same as "willneed" on macOS).
            Windows supports only "none".

    Raises:
        BundleError: invalid index, a missing shard or one with the wrong length, or a mismatch with the manifest.
        ResourceError: more shards than this process can map.
    """
    cache = read_tensor_cache(directory)
    if manifest is not None:
        _check_against_manifest(directory, cache, manifest)
    arrays: dict[str, np.ndarray] = {}
    for shard in cache.records:
        mapped = _map_shard(directory, shard, preload)
        for record in shard.records:
            flat = np.frombuffer(
                mapped,
                dtype=np.dtype(record.dtype).newbyteorder("<"),
                count=record.nbytes // np.dtype(record.dtype).itemsize,
                offset=record.byteOffset,
            )
            arrays[record.name] = flat.reshape(record.shape)
    return Params(arrays, cache.metadata)


def to_tvm(array: np.ndarray) -> tvm_ffi.Tensor:
    """View an array, even a read-only one, as a TVM tensor on the CPU without a copy.

    The array must be in C order and start at a multiple of 64 bytes, as arrays of `open_params` do.

    TVM's DLPack import requests a protocol version without a read-only flag, and numpy refuses to export
    read-only arrays that way. So we export an array over the same memory that claims to be writable.
    The pages stay read-only: a kernel that wrote to its weights would fault. The tensor keeps the memory alive.

    Raises:
        BundleError: wrong order or alignment.
    """
    import tvm_ffi

    if array.ctypes.data % ALIGNMENT:
        found = f"{array.ctypes.data % ALIGNMENT} bytes past one"
        raise BundleError(
            "cannot view an array as a tensor", expected=f"an address that is a multiple of {ALIGNMENT}", found=found
        )
    if not array.flags.c_contiguous:
        raise BundleError("cannot view an array as a tensor", expected="C order", found=f"strides {array.strides}")
    exported = np.asarray(_Exported(array))
    return tvm_ffi.from_dlpack(exported, require_alignment=ALIGNMENT, require_contiguous=True)


class _Exported:
    """Numpy's array interface over another array's memory, marked writable; keeps that array alive."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.__array_interface__ = {
            "version": 3,
            "shape": array.shape,
            "typestr": array.dtype.str,
            "data": (array.ctypes.data, False),
        }


def _map_shard(directory: Path, shard: ShardRecord, preload: Preload) -> mmap.mmap:
    path = directory / shard.dataPath
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise _wrong(directory, shard.dataPath, "a regular file", "another file type")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != shard.nbytes:
                raise _wrong(directory, shard.dataPath, f"{shard.nbytes} bytes", f"{size}")
            return _map_file(file.fileno(), preload)
    except FileNotFoundError:
        raise _wrong(directory, shard.dataPath, f"{shard.nbytes} bytes", "no such file") from None
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise ResourceError(
                f"cannot map {shard.dataPath}",
                where=directory,
                found=error.strerror,
                next_step="raise the limit on open files (ulimit -n) or on address space (ulimit -v)",
            ) from error
        raise _wrong(directory, shard.dataPath, "a readable file", error.strerror) from error


def _map_file(descriptor: int, preload: Preload) -> mmap.mmap:
    if sys.platform == "win32":
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    flags = mmap.MAP_SHARED
    if preload == "populate":
        flags |= getattr(mmap, "MAP_POPULATE", 0)
    mapped = mmap.mmap(descriptor, 0, flags=flags, prot=mmap.PROT_READ)
    with contextlib.suppress(AttributeError, OSError):  # a system without pages of 2 MB for files
        mapped.madvise(mmap.MADV_HUGEPAGE)
    if preload == "willneed" or (preload == "populate" and not hasattr(mmap, "MAP_POPULATE")):
        mapped.madvise(mmap.MADV_WILLNEED)
    return mapped


def _check_against_manifest(directory: Path, cache: TensorCache, manifest: Manifest) -> None:
    for shard in cache.records:
        listed = manifest.files.get(shard.dataPath)
        if listed is None or listed.bytes != shard.nbytes:
            expected = "an entry in the manifest" if listed is None else f"{listed.bytes} bytes, from the manifest"
            raise _wrong(directory, shard.dataPath, expected, f"{shard.nbytes} bytes")
    stored = {r.name: (tuple(r.shape), r.dtype) for shard in cache.records for r in shard.records}
    declared = {p.name: (p.shape, p.dtype) for p in manifest.params}
    for name in sorted(stored.keys() | declared.keys()):
        if stored.get(name) != declared.get(name):
            raise _wrong(directory, f"the tensor {name}", declared.get(name, "none"), stored.get(name, "none"))


def _wrong(directory: Path, what: str, expected: object, found: object) -> BundleError:
    return BundleError(what, where=directory, expected=expected, found=found, next_step=RECOMPILE)
