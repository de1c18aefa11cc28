"""TVM's runtime library without TVM's Python package: what a host needs to run compiled code.

`import tvm` brings the compiler and LLVM: about 60 MiB of private memory, 100 MiB of mapped code and most of a second
(Linux x86-64, 0.27). The runtime library is 3 MB. A process that compiles also imports `tvm`, before or after: both
find the same library loaded.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import os
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tvm_ffi
from numpy.typing import NDArray
from tvm_ffi.libinfo import load_lib_ctypes

from mlcpipe.devices.support.cuda_graph import foreign_allocation
from mlcpipe.errors import TargetError, first_line
from mlcpipe.support.disk import full_disk_named

_CPU = 1  # DLPack's kDLCPU
_POOLED = 2  # AllocatorType::kPooled of TVM's memory_manager.h
_modules: dict[tuple[Path, str], Any] = {}
_loading = threading.Lock()


def load() -> None:
    """Load the runtime library once. Raises TargetError if the package has none that loads."""
    if "tvm" not in sys.modules:  # which loads it first
        _load()


@functools.cache
def _load() -> Any:
    spec = importlib.util.find_spec("tvm")  # finds a package without importing it
    try:
        if spec is None or spec.origin is None:
            raise OSError("the package tvm is not installed")
        folder = Path(spec.origin).parent / "lib"
        return load_lib_ctypes("tvm", "tvm_runtime", "RTLD_GLOBAL", [folder])
    except (OSError, RuntimeError) as error:
        raise TargetError(
            "TVM's runtime library does not load",
            found=first_line(error),
            next_step="mlcpipe doctor says what to install",
        ) from error


@functools.cache
def function(name: str) -> Any:
    """A function that the runtime library registers, by name."""
    load()
    return tvm_ffi.get_global_func(name)


def load_module(path: Path, sha256: str | None = None) -> Any:
    """A compiled library as a module, the same one for the same bytes at the same path; it is never closed.

    With `sha256` (hex) only content with that hash is run, whatever the file holds by now.

    The system reuses a loaded library for a file of the same path or inode, whatever the file holds by now (dlopen,
    dyld, LoadLibrary). So it gets a copy: a bundle may be compiled again, or its file overwritten, while its code runs.
    Raises RuntimeError for a file that is no library, OSError for an unreadable one, ResourceError if there is no room
    for the copy.
    """
    load()
    library = path.read_bytes()
    key = (path.resolve(), hashlib.sha256(library).hexdigest())
    if sha256 not in (None, key[1]):
        raise RuntimeError("the file was changed after it was checked")
    with _loading:
        if key not in _modules:
            _modules[key] = _load_copy(library)
        return _modules[key]


def _load_copy(library: bytes) -> Any:
    """From memory if the system supports it: many forbid code in the folder of temporary files (`noexec`)."""
    try:
        descriptor = os.memfd_create("model.so")
    except (AttributeError, OSError):  # another system, or one that filters the call
        # Windows removes no library that it has loaded.
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            return _load_file(Path(folder, "model.so"), library)
    try:
        return _load_file(Path(f"/proc/self/fd/{descriptor}"), library)  # stays open, as names must differ
    except BaseException:
        os.close(descriptor)
        raise


def _load_file(path: Path, library: bytes) -> Any:
    with full_disk_named(path, len(library)):
        path.write_bytes(library)
    module = function("ffi.Module.load_from_file.so")(str(path), "so")
    function("ffi.ModuleGlobalsAdd")(module)  # else Python closes it at exit, before its users
    return module


def virtual_machine(executable: Any, device: tuple[int, int] | None = None) -> Any:
    """A virtual machine on the CPU, or a device (DLPack's type, number), for an executable; functions: `machine[name]`.

    Its memory comes from a pool of the process that keeps freed memory by size: see `release_pools`.
    """
    machine = executable["vm_load_executable"]()
    devices = [_CPU, 0, _POOLED]
    if device is not None:
        devices = [*device, _POOLED, *devices]
    machine["vm_initialization"](*devices)
    return machine


def release_pools() -> None:
    """Return unused memory of virtual machines to the system."""
    with foreign_allocation():
        function("vm.builtin.memory_manager.clear")()
    trim()


def trim() -> None:
    """Return free memory of the C library's heap to the system: glibc keeps blocks below one in use."""
    if (malloc_trim := _malloc_trim()) is not None:
        malloc_trim(0)


@functools.cache
def _malloc_trim() -> Any:
    """glibc's malloc_trim(3), None with another C library."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


def tensor(values: NDArray[Any]) -> Any:
    """A copy of an array as a tensor for kernels, aligned to 64 bytes."""
    made = empty(values.shape, values.dtype.name, tvm_ffi.device("cpu", 0))
    if values.size:
        array(made)[...] = values
    return made


def empty(shape: Sequence[int], dtype: str, device: Any) -> Any:
    """An uninitialized tensor on a device (of `tvm_ffi.device`)."""
    return function("runtime.TVMTensorAllocWithScope")(tvm_ffi.Shape(tuple(shape)), tvm_ffi.dtype(dtype), device, None)


def copy(source: Any, destination: Any) -> None:
    """Copy the numbers of a tensor to another of the same shape, from or to any device, without waiting for it."""
    function("runtime.TVMTensorCopyFromTo")(source, destination)


def wait_for(device: Any) -> None:
    """Wait until a device has finished all its work."""
    function("runtime.Device_StreamSync")(device, 0)


def array(made: Any) -> NDArray[Any]:
    """The numbers of a tensor, not a copy: valid while the tensor keeps them."""
    found = np.from_dlpack(made)
    return found if found.flags.writeable else np.asarray(_Writable(found))


class _Writable:
    """The same numbers for writing: NumPy before 2.3 takes what comes by DLPack for read-only."""

    def __init__(self, found: NDArray[Any]) -> None:
        self._found = found  # keeps them
        self.__array_interface__ = {**found.__array_interface__, "data": (found.ctypes.data, False)}


def view(made: Any, shape: Sequence[int], begin_bytes: int = 0) -> Any:
    """The numbers of a tensor from `begin_bytes` on, in another shape. Kernels only accept views of the beginning."""
    return function("runtime.TVMTensorCreateView")(made, tvm_ffi.Shape(tuple(shape)), made.dtype, begin_bytes)
