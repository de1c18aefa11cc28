"""OpenCL C that TVM generates of the kernels for GPUs, and what clang says of it. Nothing of mlcpipe runs it."""

from __future__ import annotations

import re
import subprocess

from mlcpipe.compiler.backends.base import global_functions
from mlcpipe.compiler.build import build_for_device
from mlcpipe.passes import pipeline
from mlcpipe.passes.lowering import Lowering

_KERNEL = re.compile(r"^(__kernel void (\w+)\([^\n]*\) \{\n)(.*?)^\}\n", re.MULTILINE | re.DOTALL)
_LOCAL = re.compile(r"^ +(__local (\w+) (\w+)\[(\d+)\];\n)", re.MULTILINE)
BYTES = {"half": 2, "float": 4, "int": 4, "uint": 4, "long": 8, "char": 1, "uchar": 1, "short": 2, "ushort": 2}


def source(scheduled: Lowering) -> str:
    """The model's kernels, as a backend's `source` gives them."""
    found: list[str] = []

    def keep(generated: str, target: object) -> str:
        found.append(generated)
        return generated

    with global_functions({"tvm_callback_opencl_postproc": keep}):
        build_for_device(scheduled, registered=False, kernel_phase=pipeline.SOURCES)
    return "\n".join(found)


def with_locals_first(source: str) -> str:
    """Local arrays at the top of kernels, where OpenCL wants them (6.5.2); TVM declares them where they are used."""

    def moved(match: re.Match[str]) -> str:
        found = "".join(f"  {local[0]}" for local in _LOCAL.findall(match[3]))
        return match[1] + found + _LOCAL.sub("", match[3]) + "}\n"

    return _KERNEL.sub(moved, source)


def local_bytes(source: str) -> dict[str, int]:
    """Local memory of each kernel."""
    return {
        match[2]: sum(BYTES[local[1]] * int(local[3]) for local in _LOCAL.findall(match[3]))
        for match in _KERNEL.finditer(source)
    }


def errors_of(source: str, clang: str) -> list[str]:
    """What clang says against it, as OpenCL C 2.0."""
    command = [clang, "-x", "cl", "-cl-std=CL2.0", "-Xclang", "-finclude-default-header", "-fsyntax-only", "-w", "-"]
    done = subprocess.run(command, input=source, capture_output=True, text=True, timeout=120, check=False)
    found = [line for line in done.stderr.splitlines() if "error:" in line]
    assert (done.returncode == 0) == (not found), done.stderr[:500]
    return found
