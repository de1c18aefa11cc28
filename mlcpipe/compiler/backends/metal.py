"""Libraries for Apple's GPUs: host code, and kernels as source that the system compiles when it loads them."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import tvm_ffi

from mlcpipe.compiler import driver_check
from mlcpipe.compiler.backends.base import DeviceLibrary, Runner, global_functions
from mlcpipe.compiler.build import build_for_device
from mlcpipe.compiler.link import Linker, find_archiver, find_linker, find_zig
from mlcpipe.errors import CompileError
from mlcpipe.passes import pipeline
from mlcpipe.passes.lowering import Lowering
from mlcpipe.support.resources import native_path
from mlcpipe.targets import Target, Variant, triple

OPTIONS = ()
NATIVE_SOURCES, NATIVE_SYSTEMS = native_path() / "metal", ("ios",)

# The oldest system that TVM's wheel for macOS supports. Machines other than a Mac link for it with zig.
_ZIG_TARGET = "aarch64-macos.13.0"
PREAMBLE = native_path() / "metal" / "preamble.metal"
_USING = "using namespace metal;\n"
# `tir_schedules/gpu/device_calls.py` names functions with a dot, which C++ names cannot contain.
_DOTTED, _PLAIN = "mlcpipe.", "mlcpipe_"
_BODY = re.compile(r"^kernel void [^{]*\{\n", re.MULTILINE)
_MATRIX = re.compile(r"mlcpipe_matrix_(?:clear|load)(\(\d+, \d+, \d+, \d+)")


def kernel_of(generated: str) -> str:
    """TVM's kernel, preceded by the functions that it calls. Raises CompileError if the text is not a kernel."""
    before, using, after = generated.partition(_USING)
    if not using:
        raise CompileError("TVM generated no Metal kernel", found=generated.strip()[:80])
    return before + using + PREAMBLE.read_text(encoding="utf-8") + _with_matrices(after.replace(_DOTTED, _PLAIN))


def _with_matrices(kernel: str) -> str:
    """Declare the variable of each SIMD group matrix at the top: `device_calls.py` only numbers them."""
    matrices = dict.fromkeys(_MATRIX.findall(kernel))
    if not matrices:
        return kernel
    declarations = "".join(f"  mlcpipe_matrix_new{facts});\n" for facts in matrices)
    return _BODY.sub(lambda match: match[0] + declarations, kernel, count=1)


def register() -> None:
    """Make TVM put the preamble into kernels of kind `metal` in this process."""
    for name, function in _callbacks().items():
        tvm_ffi.register_global_func(name, function, override=True)


def _callbacks(sources: list[str] | None = None) -> dict[str, Callable[..., list[str]]]:
    """The function that TVM calls with each kernel; `sources` collects the kernels."""

    def completed(generated: str, target: Any) -> list[str]:
        source = kernel_of(generated)
        if sources is not None:
            sources.append(source)
        return [source, "metal"]

    return {"tvm_callback_metal_compile": completed}


def find(target: Target) -> DeviceLibrary:
    """Find a linker for macOS or an archiver for iOS. Raises CompileError that names the command to install it."""
    linker = find_linker(triple(target)) if target.archive else find_apple_linker()
    archiver = find_archiver() if target.archive else None
    return DeviceLibrary(linker, _generator, archiver=archiver, kernel_phase=pipeline.SOURCES)


@contextmanager
def _generator(scheduled: Lowering) -> Iterator[Sequence[Any]]:
    with global_functions(_callbacks()):
        yield driver_check.modules(scheduled, float16=True, kernel_phase=pipeline.SOURCES)


def source(scheduled: Lowering) -> str:
    """Metal's shading language."""
    sources: list[str] = []
    with global_functions(_callbacks(sources)):
        build_for_device(scheduled, registered=False, kernel_phase=pipeline.SOURCES)
    return "\n".join(sources)


def runner(target: Target, variant: Variant) -> Runner:
    """Raises CompileError: no Mac has measured kernels yet."""
    raise CompileError("nothing here measures kernels for Metal", where=target.name)


def find_apple_linker() -> Linker:
    """The system's compiler on a Mac, elsewhere zig, which can link for macOS.

    Raises CompileError that names the command to install one.
    """
    if sys.platform == "darwin":
        return find_linker()
    if (zig := find_zig()) is None:
        raise CompileError("no linker for macOS", expected="ziglang, or a Mac", next_step="pip install 'mlcpipe[zig]'")
    return replace(zig, command=(*zig.command, "-target", _ZIG_TARGET), system="darwin")
