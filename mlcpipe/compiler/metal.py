"""Libraries for Apple's GPUs: host code and the source of kernels, which the system compiles when it loads them."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import tvm_ffi

from mlcpipe.compiler.link import Linker, find_linker, find_zig
from mlcpipe.errors import CompileError

# The oldest system that TVM's wheel for macOS runs on; other machines than a Mac link for it with zig.
_ZIG_TARGET = "aarch64-macos.13.0"
PREAMBLE = Path(__file__).parents[1] / "native" / "metal" / "preamble.metal"
_USING = "using namespace metal;\n"
# `tir_schedules/gpu/device_calls.py` names functions with a dot, which C++ does not have in names.
_DOTTED, _PLAIN = "mlcpipe.", "mlcpipe_"
_BODY = re.compile(r"^kernel void [^{]*\{\n", re.MULTILINE)
_MATRIX = re.compile(r"mlcpipe_matrix_(?:clear|load)(\(\d+, \d+, \d+, \d+)")


def kernel_of(generated: str) -> str:
    """A kernel that TVM generated, with the functions that it calls before it. Raises CompileError for other text."""
    before, using, after = generated.partition(_USING)
    if not using:
        raise CompileError("TVM generated no Metal kernel", found=generated.strip()[:80])
    return before + using + PREAMBLE.read_text(encoding="utf-8") + _with_matrices(after.replace(_DOTTED, _PLAIN))


def _with_matrices(kernel: str) -> str:
    """Matrices of a SIMD group are variables, of which `device_calls.py` has numbers only: declare each at the top."""
    found = dict.fromkeys(_MATRIX.findall(kernel))
    if not found:
        return kernel
    declared = "".join(f"  mlcpipe_matrix_new{facts});\n" for facts in found)
    return _BODY.sub(lambda match: match[0] + declared, kernel, count=1)


def register(found: list[str] | None = None) -> None:
    """Put the preamble into what TVM generates for kind `metal` in this process; `found` gets the kernels."""

    def completed(generated: str, target: Any) -> list[str]:
        source = kernel_of(generated)
        if found is not None:
            found.append(source)
        return [source, "metal"]

    tvm_ffi.register_global_func("tvm_callback_metal_compile", completed, override=True)


def find_apple_linker() -> Linker:
    """The system's compiler on a Mac, elsewhere zig, which has what it takes to link for macOS.

    Raises CompileError that names the command to install one.
    """
    if sys.platform == "darwin":
        return find_linker()
    zig = _zig("no linker for macOS")
    return replace(zig, command=(*zig.command, "-target", _ZIG_TARGET), system="darwin")


def find_archiver() -> Linker:
    """The system's `ar` on a Mac, elsewhere zig's, which knows Apple's objects. Raises CompileError.

    zig links no dynamic library for iOS: it has no part of that system's SDK. A static library needs none.
    """
    if sys.platform == "darwin":
        return Linker("ar", find_linker().version, ("ar",))
    zig = _zig("nothing makes static libraries for iOS")
    return replace(zig, command=(*zig.command[:-1], "ar", "--format=darwin"), system="darwin")


def _zig(problem: str) -> Linker:
    zig = find_zig()
    if zig is None:
        raise CompileError(problem, expected="ziglang, or a Mac", next_step="pip install 'mlcpipe[zig]'")
    return zig
