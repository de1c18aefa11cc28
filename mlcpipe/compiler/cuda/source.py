"""TVM's CUDA C++, made ready for NVRTC: with a preamble of ours instead of one that needs NVIDIA's C++ library."""

from __future__ import annotations

import re
from pathlib import Path

from mlcpipe.errors import CompileError

PREAMBLE = Path(__file__).parents[2] / "native" / "cuda" / "preamble.cuh"
_FIRST = 'extern "C" __global__'
# `tir_schedules/gpu/device_calls.py` names functions with a dot, which C++ does not have in names.
_DOTTED, _PLAIN = "mlcpipe.", "mlcpipe_"
_BOUNDS = re.compile(r"__launch_bounds__\((\d+)\) (\w+)")
_BODY = re.compile(r"__launch_bounds__\(\d+\) (\w+)\([^;{]*\) \{\n(.*?)^\}", re.DOTALL | re.MULTILINE)
# Threads that a multiprocessor shall have place for, with its 65536 registers of 32 bits; those that keep the sums of
# products of matrices need twice as many. Without a word about it the assembler spills some to fit more threads.
_RESIDENT, _RESIDENT_MMA = 512, 256


def kernels_of(generated: str) -> str:
    """What TVM generated from the first kernel on, after the preamble. Raises CompileError without a kernel."""
    at = generated.find(_FIRST)
    if at < 0:
        raise CompileError("TVM generated no CUDA kernel", found=generated.strip()[:80])
    kernels = generated[at:].replace(_DOTTED, _PLAIN)
    products = {match[1] for match in _BODY.finditer(kernels) if "mlcpipe_mma(" in match[2]}

    def bounds(match: re.Match[str]) -> str:
        resident = _RESIDENT_MMA if match[2] in products else _RESIDENT
        return f"__launch_bounds__({match[1]}, {max(1, resident // int(match[1]))}) {match[2]}"

    return PREAMBLE.read_text(encoding="utf-8") + _BOUNDS.sub(bounds, kernels)
