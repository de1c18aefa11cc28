"""TVM's code generator for kind `cuda`, with NVIDIA's compiler behind it: a fat binary for several architectures.

Where TVM has no CUDA runtime in this process, which is so without an NVIDIA driver, it would put the source into the
library, to be compiled where it runs. Then what is generated is replaced by machine code before TVM has a module of it,
and the module's format, which says that it is source, is changed in the object file.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import tvm
import tvm_ffi

from mlcpipe.compiler.cuda.nvrtc import MachineCode, Nvrtc
from mlcpipe.compiler.cuda.source import kernels_of
from mlcpipe.errors import CompileError
from mlcpipe.runtime.threads import physical_cores

Compiler = Callable[[str], bytes]


def register(compiler: Compiler) -> None:
    """Give what TVM generates for kind `cuda` in this process to `compiler`: CUDA C++ -> what the driver loads."""
    with_runtime = tvm.get_global_func("ffi.Module.create.cuda", allow_missing=True) is not None

    def compiled(generated: str) -> bytes:
        return compiler(kernels_of(generated))

    def replaced(generated: str, target: Any) -> str | bytes:
        return generated if with_runtime else compiled(generated)

    tvm_ffi.register_global_func("tvm_callback_cuda_compile", compiled, override=True)
    tvm_ffi.register_global_func("tvm_callback_cuda_postproc", replaced, override=True)


def fat_binary(nvrtc: Nvrtc, architectures: Sequence[str]) -> Compiler:
    """What compiles kernels for each architecture. Raises CompileError where there is none."""
    if not architectures:
        raise CompileError("the target names no architectures", expected='architectures = ["sm_80"]')
    return lambda source: nvrtc.bundle(machine_code(nvrtc, source, architectures))


def machine_code(nvrtc: Nvrtc, source: str, architectures: Sequence[str]) -> list[MachineCode]:
    """Kernels for each architecture, on as many threads as there are cores. Raises CompileError."""
    with ThreadPoolExecutor(min(physical_cores(), len(architectures))) as pool:
        return list(pool.map(lambda architecture: nvrtc.compile(source, architecture), architectures))


# A module as TVM stores it: the length and text of its kind, the length of its bytes, and those, which begin with the
# length and text of the format. The runtime compiles the format "cuda" and loads all others as they are.
_KIND = struct.pack("<Q", 4) + b"cuda"
_LOADED = b"cubi"


def mark_compiled(files: Sequence[Path]) -> None:
    """Say in the object files of a library that its CUDA module is machine code. Raises CompileError without one."""
    marked = 0
    for path in files:
        data, at = bytearray(path.read_bytes()), -1
        while (at := data.find(_KIND, at + 1)) >= 0:
            stored = at + len(_KIND) + 8
            if data.startswith(_KIND, stored):
                data[stored + 8 : stored + len(_KIND)] = _LOADED
                marked += 1
        path.write_bytes(data)
    if marked != 1 and tvm.get_global_func("ffi.Module.create.cuda", allow_missing=True) is None:
        raise CompileError("TVM stores CUDA modules in another way", expected="one to mark", found=marked)
