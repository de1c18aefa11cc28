"""Generated Metal kernels on the CPU: compiled by clang, behind our device API for Metal (`emulator/`)."""

from __future__ import annotations

import ctypes
import hashlib
import platform
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tvm_ffi
from numpy.typing import NDArray

from mlcpipe.devices import metal
from mlcpipe.devices.support import tvm_runtime
from tests.emulator import process
from tests.metal import msl

if TYPE_CHECKING:
    from mlcpipe.compiler.native_runtime import DevicePlugin

FOLDER = Path(__file__).parent / "emulator"
_NATIVE = process.ROOT / "mlcpipe" / "native"
_SHIM = _NATIVE / "tvm_shim"
# On x86 earlier ones have float16 only where the CPU's arithmetic does.
_CLANG = 15
# What makes threads wait for one another.
_WAITS = re.compile(r"_barrier\(|simd_|mlcpipe_matrix_|mlcpipe_subgroup_(?!lane|id)")
_KEPT: list[Any] = []
_TEXTS = ctypes.POINTER(ctypes.c_char_p)
_COMPILER = ctypes.CFUNCTYPE(None, _TEXTS, _TEXTS, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t)
_SHARED = r'\1static __attribute__((section("emulated_shared"))) \2 \3[\4];'


def missing() -> str:
    """What the emulator needs and this machine lacks, "" if nothing."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "the emulator of Metal runs on Linux x86-64 only"
    if shutil.which("g++") is None:
        return "g++ is missing"
    return "" if msl.find_clang(_CLANG) else f"neither clang {_CLANG} nor ziglang is installed"


def build_runtime(folder: Path) -> Path:
    """The device API, with the emulated GPU, as a shared library."""
    library = folder / "libemulated_metal.so"
    packages = [Path(str(spec.origin)).parent for name in ("tvm", "tvm_ffi") if (spec := find_spec(name)) is not None]
    includes = [
        _NATIVE / "metal",
        _SHIM,
        _SHIM / "include",
        packages[0],
        *(package / "include" for package in packages),
    ]
    libraries = [f"-L{package / 'lib'}" for package in packages]
    command = ["g++", "-std=c++17", "-O0", "-fPIC", "-shared", "-w", *(f"-I{path}" for path in includes)]
    process.run_compiler(
        [*command, str(FOLDER / "python.cc"), "-o", str(library), *libraries, "-ltvm_runtime", "-ltvm_ffi", "-ldl"]
    )
    return library


def native_plugin() -> DevicePlugin:
    """What the native runtime is built with for the emulated GPU."""
    from mlcpipe.compiler.native_runtime import DevicePlugin

    return DevicePlugin(FOLDER / "native.cc", "MLCPIPE_METAL", "c++17", _NATIVE / "metal")


def start_native(runtime: Path, folder: Path, change: Callable[[str], str] = str) -> ctypes.CDLL:
    """Load a native runtime with the emulated GPU; `change` gives the source that is compiled in the place of another.

    One such library in a process: the kernels find their threads by names that are global.
    """
    library = ctypes.CDLL(str(runtime), ctypes.RTLD_GLOBAL)

    def compile_all(names: Any, sources: Any, count: int, path: int, room: int) -> None:
        texts = {names[i].decode(): change(sources[i].decode()) for i in range(count)}
        made = compile_kernels(texts, folder).encode() + b"\0"
        assert len(made) <= room
        ctypes.memmove(path, made, len(made))

    _KEPT.append(_COMPILER(compile_all))  # for as long as the library
    library.emulated_metal_compiler(_KEPT[-1])
    return library


def start(runtime: Path, folder: Path) -> None:
    """Make `metal:0` a device of TVM in this process; kernels are compiled in a folder."""
    tvm_runtime.load()
    ctypes.CDLL(str(runtime), ctypes.RTLD_GLOBAL)
    tvm_ffi.register_global_func(
        "emulated_metal.compile",
        lambda sources: compile_kernels({str(name): str(text) for name, text in sources.items()}, folder),
    )
    # What stands in for the runtime library of macOS is loaded.
    metal.load = lambda: None  # type: ignore[assignment]


def compile_kernels(sources: Mapping[str, str], folder: Path) -> str:
    """Kernels by name -> the path of a library with them."""
    parts = ["#define EMULATED\n#include <emulated.h>\n"]
    for i, (name, source) in enumerate(sources.items()):
        text = msl.SHARED.sub(_SHARED, source)
        body = text[text.index("kernel void ") :]
        parts.append(f"namespace kernel_{i} {{\n{text}}}\n")
        parts.append(f"EMULATED_KERNEL(kernel_{i}, {name}, {int(_WAITS.search(body) is not None)})\n")
    whole = "".join(parts)
    made = folder / hashlib.sha256(whole.encode()).hexdigest()[:16]
    library = made.with_suffix(".so")
    if not library.exists():
        made.with_suffix(".metal").write_text(whole, encoding="utf-8")
        clang = msl.find_clang(_CLANG)
        assert clang is not None
        command = [*clang, "-target", "x86_64-linux-gnu", "-x", "c++", "-std=c++14", "-O0", "-fPIC", "-nostdinc", "-w"]
        command += ["-fno-strict-aliasing", "-ffp-contract=off", f"-I{FOLDER}", f"-I{FOLDER.parent / 'msl'}", "-c"]
        process.run_compiler([*command, str(made.with_suffix(".metal")), "-o", str(made.with_suffix(".o"))])
        process.run_compiler(["g++", "-shared", str(made.with_suffix(".o")), "-o", str(library), "-lm"])
    return str(library)


def run_engines(runtime: Path, jobs: Sequence[dict[str, Any]], folder: Path) -> list[dict[str, NDArray[Any]]]:
    """Each job in `Engine` on the emulated device, in one process of their own: see `emulated_engine.py`."""
    return process.run_engines("tests.metal.emulated_engine", {"runtime": str(runtime)}, jobs, folder)
