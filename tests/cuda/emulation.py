"""Generated CUDA C++ on the CPU: kernels compiled by the host's compiler, behind a driver of ours (`emulator/`).

TVM's CUDA runtime is the real one; what it calls of NVIDIA's libraries is in `emulator/emulator.cc`.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from numpy.typing import NDArray

from mlcpipe.compiler import device_library
from mlcpipe.compiler.backends.nvrtc import codegen as build
from mlcpipe.compiler.backends.nvrtc.nvrtc import Nvrtc
from tests.emulator import process

FOLDER = Path(__file__).parent / "emulator"
_KERNEL = re.compile(r'extern "C" __global__ void (?:__launch_bounds__\([\d, ]+\) )?(\w+)\([^;{]*\) \{')
# What makes threads wait for one another.
_WAITS = re.compile(r"__sync|__shfl|mlcpipe_subgroup_\w*(?:add|max|shuffle|broadcast)|mma")


def missing() -> str:
    """What the emulator needs and this machine lacks, "" if nothing."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "the emulator of CUDA runs on Linux x86-64 only"
    return "" if shutil.which("g++") else "g++ is missing"


def build_driver(folder: Path, nvrtc: Nvrtc) -> tuple[Path, Path]:
    """`libcudart.so.13` with everything in it, and `libcuda.so.1`, which needs it."""
    runtime, driver = folder / "libcudart.so.13", folder / "libcuda.so.1"
    symbols = folder / "symbols"
    symbols.write_text(f"{runtime.name} {{ global: cu*; emulated_*; *Idx; *Dim; local: *; }};\n")
    _compile(FOLDER / "emulator.cc", runtime, f"-I{nvrtc.include}", f"-Wl,--version-script={symbols}", "-ldl")
    _compile(Path(os.devnull), driver, str(runtime))
    return runtime, driver


def compile_kernels(source: str, folder: Path) -> bytes:
    """What the emulated driver loads for a source of kernels: the path of a library."""
    kernels = {match[1]: source[match.end() :].split('extern "C"')[0] for match in _KERNEL.finditer(source)}
    assert kernels, source[:200]
    ends = [f"EMULATED_KERNEL({name}, {int(_WAITS.search(body) is not None)})" for name, body in kernels.items()]
    digest = hashlib.sha256(source.encode()).hexdigest()[:16]
    path, library = folder / f"{digest}.cc", folder / f"{digest}.so"
    if not library.exists():
        path.write_text("\n".join([source, "EMULATED_MODULE", *ends, ""]), encoding="utf-8")
        _compile(
            path, library, "-w", "-fno-strict-aliasing", "-ffp-contract=off", "-Wl,--unresolved-symbols=ignore-all"
        )
    return f"emulated:{library}\0".encode()


def _compile(source: Path, output: Path, *options: str) -> None:
    command = ["g++", "-x", "c++", "-O1", "-fPIC", "-shared", "-std=c++17", f"-I{FOLDER}", f"-Wl,-soname,{output.name}"]
    process.run_compiler([*command, str(source), "-x", "none", "-o", str(output), *options])


def emulate(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """From now on the target's compiler makes kernels for the emulator."""
    monkeypatch.setattr(device_library, "kernel_store", lambda dump: None)  # it has NVRTC's
    monkeypatch.setattr(build, "fat_binary", lambda nvrtc, names: lambda source: compile_kernels(source, folder))


def run_engines(
    driver: tuple[Path, Path], jobs: Sequence[dict[str, Any]], folder: Path
) -> list[dict[str, NDArray[Any]]]:
    """Each job in `Engine` on the emulated device, in one process of their own: see `emulated_engine.py`."""
    libraries = [str(path) for path in driver]
    return process.run_engines("tests.cuda.emulated_engine", {"libraries": libraries}, jobs, folder)
