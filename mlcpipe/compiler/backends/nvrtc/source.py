"""Prepares TVM's CUDA C++ for NVRTC: replaces the preamble, which needs NVIDIA's C++ library, with ours."""

from __future__ import annotations

import re

from mlcpipe.errors import CompileError
from mlcpipe.support.resources import native_path

PREAMBLE = native_path() / "cuda" / "preamble.cuh"
_FIRST = 'extern "C" __global__'
# `tir_schedules/gpu/device_calls.py` names functions with a dot, which C++ names cannot contain.
_DOTTED, _PLAIN = "mlcpipe.", "mlcpipe_"
_BOUNDS = re.compile(r"__launch_bounds__\((\d+)\) (\w+)")
_BODY = re.compile(r"__launch_bounds__\([\d, ]+\) (\w+)\([^;{]*\) \{\n(.*?)^\}", re.DOTALL | re.MULTILINE)
_STATED = re.compile(r"mlcpipe_resident\((\d+)\)")
# Minimum resident threads per multiprocessor, which has 65536 32-bit registers; threads that hold sums of matrix
# products need twice as many registers, unless the kernel says what it needs. Without launch bounds the assembler
# spills registers to fit more threads.
_RESIDENT, _RESIDENT_MMA = 512, 256
_LOOP = re.compile(r"^( *)for \(", re.MULTILINE)


def kernels_of(generated: str) -> str:
    """TVM's code from the first kernel, after our preamble. Raises CompileError without a kernel."""
    at = generated.find(_FIRST)
    if at < 0:
        raise CompileError("TVM generated no CUDA kernel", found=generated.strip()[:80])
    kernels = generated[at:].replace(_DOTTED, _PLAIN)
    resident_threads = {match[1]: _resident(match[2]) for match in _BODY.finditer(kernels)}

    def bounds(match: re.Match[str]) -> str:
        resident = resident_threads[match[2]]
        return f"__launch_bounds__({match[1]}, {max(1, resident // int(match[1]))}) {match[2]}"

    return PREAMBLE.read_text(encoding="utf-8") + _BODY.sub(_rolled, _BOUNDS.sub(bounds, kernels))


def _rolled(kernel: re.Match[str]) -> str:
    """A kernel that says what registers suffice for: a loop that the compiler unrolled would need more."""
    return _LOOP.sub(r"\1#pragma unroll 1\n\1for (", kernel[0]) if _STATED.search(kernel[2]) else kernel[0]


def _resident(body: str) -> int:
    if stated := _STATED.search(body):
        return int(stated[1])
    return _RESIDENT_MMA if "mlcpipe_mma(" in body else _RESIDENT
