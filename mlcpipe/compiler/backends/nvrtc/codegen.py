"""TVM's code generator for kind `cuda`, followed by NVIDIA's compiler: a fat binary for several architectures.

Without an NVIDIA driver TVM has no CUDA runtime in this process, and would store CUDA C++ in the library, to be
compiled where it runs. We then replace the source by machine code before TVM makes a module of it, and change the
module's format in the object file, which would say that it is source.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import tvm
import tvm_ffi

from mlcpipe.compiler.backends.nvrtc.nvrtc import MachineCode, Nvrtc
from mlcpipe.compiler.backends.nvrtc.source import kernels_of
from mlcpipe.devices.support.threads import physical_cores
from mlcpipe.errors import CompileError

Compiler = Callable[[str], bytes]


def register(compiler: Compiler) -> None:
    """Compile TVM's CUDA C++ in this process with `compiler`, which returns what the driver loads."""
    for name, function in callbacks(compiler).items():
        tvm_ffi.register_global_func(name, function, override=True)


def callbacks(compiler: Compiler) -> dict[str, Callable[..., str | bytes]]:
    """The functions that `register` puts into TVM's global registry."""
    with_runtime = has_runtime()

    def compiled(generated: str) -> bytes:
        return compiler(kernels_of(generated))

    def replaced(generated: str, target: Any) -> str | bytes:
        return generated if with_runtime else compiled(generated)

    return {"tvm_callback_cuda_compile": compiled, "tvm_callback_cuda_postproc": replaced}


def has_runtime() -> bool:
    """Whether TVM has a CUDA runtime in this process."""
    return tvm.get_global_func("ffi.Module.create.cuda", allow_missing=True) is not None


def fat_binary(nvrtc: Nvrtc, architectures: Sequence[str]) -> Compiler:
    """A compiler of kernels for several architectures. Raises CompileError if there are none."""
    if not architectures:
        raise CompileError("the target names no architectures", expected='architectures = ["sm_80"]')
    return lambda source: nvrtc.bundle(machine_code(nvrtc, source, architectures))


def machine_code(nvrtc: Nvrtc, source: str, architectures: Sequence[str]) -> list[MachineCode]:
    """Compile kernels for each architecture, with one thread per core. Raises CompileError."""
    with ThreadPoolExecutor(min(physical_cores(), len(architectures))) as pool:
        return list(pool.map(lambda architecture: nvrtc.compile(source, architecture), architectures))


# TVM stores a module as length and text of its kind, then length and bytes of the module, which start with length and
# text of the format. The runtime compiles the format "cuda" and loads all others unchanged.
_KIND = struct.pack("<Q", 4) + b"cuda"
_LOADED = b"cubi"


def mark_compiled(files: Sequence[Path]) -> None:
    """Mark the CUDA module in a library's object files as machine code. Raises CompileError without one."""
    marked = 0
    for path in files:
        data, at = bytearray(path.read_bytes()), -1
        while (at := data.find(_KIND, at + 1)) >= 0:
            stored = at + len(_KIND) + 8
            if data.startswith(_KIND, stored):
                data[stored + 8 : stored + len(_KIND)] = _LOADED
                marked += 1
        path.write_bytes(data)
    if marked != 1 and not has_runtime():
        raise CompileError("TVM stores CUDA modules in an unexpected format", expected="one module", found=marked)
