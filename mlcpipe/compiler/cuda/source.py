"""TVM's CUDA C++, made ready for NVRTC: with a preamble of ours instead of one that needs NVIDIA's C++ library."""

from __future__ import annotations

import re
from pathlib import Path

from mlcpipe.errors import CompileError

PREAMBLE = Path(__file__).parents[2] / "native" / "cuda" / "preamble.cuh"
_FIRST = 'extern "C" __global__'
# `tir_schedules/gpu/device_calls.py` names functions with a dot, which C++ does not have in names.
_DOTTED, _PLAIN = "mlcpipe.", "mlcpipe_"
_BOUNDS = re.compile(r"__launch_bounds__\((\d+)\)")
# Threads that a multiprocessor shall have place for, with its 65536 registers of 32 bits. Without a word about it the
# assembler puts some registers into memory to fit more.
_RESIDENT = 512


def kernels_of(generated: str) -> str:
    """What TVM generated from the first kernel on, after the preamble. Raises CompileError without a kernel."""
    at = generated.find(_FIRST)
    if at < 0:
        raise CompileError("TVM generated no CUDA kernel", found=generated.strip()[:80])
    kernels = _BOUNDS.sub(_with_blocks, generated[at:].replace(_DOTTED, _PLAIN))
    return PREAMBLE.read_text(encoding="utf-8") + kernels


def _with_blocks(match: re.Match[str]) -> str:
    return f"__launch_bounds__({match[1]}, {max(1, _RESIDENT // int(match[1]))})"
