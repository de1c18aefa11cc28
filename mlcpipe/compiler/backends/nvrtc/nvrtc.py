"""NVIDIA's run-time compiler, used ahead of time: CUDA C++ -> machine code, PTX, resource use.

It needs no GPU and no driver. https://docs.nvidia.com/cuda/nvrtc, https://docs.nvidia.com/cuda/nvfatbin
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mlcpipe.compiler.backends.nvrtc.resources import Usage, parse_usage
from mlcpipe.errors import CompileError

INSTALL = "pip install 'mlcpipe[cuda]'"
# The packages install into nvidia/cu13. TVM's CUDA runtime is linked with the same major version.
_PACKAGE = "cu13"
_LIBRARIES = {"linux": "lib/lib{name}.so.13*", "win32": "bin/x86_64/{name}*.dll"}


@dataclass(frozen=True)
class MachineCode:
    """Kernels for one architecture: an ELF file, its PTX, and each kernel's resource use."""

    architecture: str
    cubin: bytes
    ptx: bytes
    usage: tuple[Usage, ...]


@dataclass(frozen=True)
class Nvrtc:
    """The compiler: its version, the folder of its headers, and its libraries."""

    version: str
    include: Path
    library: Any
    fatbin: Any

    @property
    def name(self) -> str:
        """The name in the manifest."""
        return "NVRTC"

    @property
    def build(self) -> str:
        """Tells builds of a version apart: size and time of each library, and of a header."""
        paths = [Path(library._name) for library in (self.library, self.fatbin)] + [self.include / "cuda_fp16.h"]
        return str([(status.st_size, status.st_mtime_ns) for status in (path.stat() for path in paths)])

    def compile(self, source: str, architecture: str) -> MachineCode:
        """Compile kernels for an architecture such as sm_80. Raises CompileError with the compiler's first error."""
        options = [f"--gpu-architecture={architecture}", f"-I{self.include}", "--std=c++17", "--ptxas-options=-v"]
        options += ["--disable-warnings"]  # TVM declares variables that it does not use
        program = ctypes.c_void_p()
        self._check("nvrtcCreateProgram", ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None)
        try:
            arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            failed = self.library.nvrtcCompileProgram(program, len(options), arguments)
            log = self._bytes("ProgramLog", program).decode(errors="replace")
            if failed:
                lines = [line for line in log.splitlines() if "error" in line] or [f"error {failed}"]
                raise CompileError("NVRTC refuses the kernels", where=architecture, found=lines[0][:300])
            cubin, ptx = self._bytes("CUBIN", program), self._bytes("PTX", program)
        finally:
            self.library.nvrtcDestroyProgram(ctypes.byref(program))
        return MachineCode(architecture, cubin, ptx, parse_usage(log))

    def _bytes(self, what: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._check(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._check(f"nvrtcGet{what}", program, buffer)
        return buffer.raw if what == "CUBIN" else buffer.raw.rstrip(b"\0")

    def _check(self, name: str, *arguments: Any) -> None:
        failed = getattr(self.library, name)(*arguments)
        if failed:
            raise CompileError(f"NVRTC's {name} failed", found=f"error {failed}", next_step="see `mlcpipe doctor`")

    def bundle(self, codes: Sequence[MachineCode]) -> bytes:
        """A fat binary: all machine code, and the first architecture's PTX, which drivers compile for others."""
        handle = ctypes.c_void_p()
        self._pack("nvFatbinCreate", ctypes.byref(handle), None, ctypes.c_size_t(0))
        try:
            for code in codes:
                arch = code.architecture.removeprefix("sm_").encode()
                self._pack("nvFatbinAddCubin", handle, code.cubin, ctypes.c_size_t(len(code.cubin)), arch, b"kernels")
            first = codes[0]
            arch, text = first.architecture.removeprefix("sm_").encode(), first.ptx + b"\0"
            self._pack("nvFatbinAddPTX", handle, text, ctypes.c_size_t(len(text)), arch, b"kernels", None)
            size = ctypes.c_size_t()
            self._pack("nvFatbinSize", handle, ctypes.byref(size))
            binary = ctypes.create_string_buffer(size.value)
            self._pack("nvFatbinGet", handle, binary)
        finally:
            self.fatbin.nvFatbinDestroy(ctypes.byref(handle))
        return binary.raw

    def _pack(self, name: str, *arguments: Any) -> None:
        failed = getattr(self.fatbin, name)(*arguments)
        if failed:
            raise CompileError(f"{name} failed", found=f"error {failed}", next_step="see `mlcpipe doctor`")


@cache
def find_nvrtc() -> Nvrtc:
    """Find NVIDIA's Python packages. Raises CompileError with the command to install them."""
    folders = _folders()
    for folder in folders:
        builtins, library = (_load(folder, name) for name in ("nvrtc-builtins", "nvrtc"))
        # Packages may be in several places: an environment's own and those that it sees.
        fatbin = next((found for other in folders if (found := _load(other, "nvfatbin")) is not None), None)
        if builtins is None or library is None or fatbin is None or not (folder / "include" / "cuda_fp16.h").is_file():
            continue
        major, minor = ctypes.c_int(), ctypes.c_int()
        library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        return Nvrtc(f"{major.value}.{minor.value}", folder / "include", library, fatbin)
    raise CompileError("NVIDIA's compiler is not installed", expected="NVRTC 13 and nvFatbin", next_step=INSTALL)


def _folders() -> list[Path]:
    spec = importlib.util.find_spec("nvidia")
    locations = spec.submodule_search_locations if spec is not None else None
    return [Path(location) / _PACKAGE for location in locations or ()]


def _load(folder: Path, name: str) -> Any:
    """A library of the package. The builtins must be loaded first: NVRTC only searches system folders for them."""
    for path in sorted(folder.glob(_LIBRARIES.get(sys.platform, "nothing").format(name=name))):
        if ".alt." not in path.name:
            try:
                return ctypes.CDLL(str(path))
            except OSError:
                return None
    return None
