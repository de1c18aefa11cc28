"""Links object files into a library: by the system's C compiler, PyPI's ziglang, or `mlcpipe.compiler.elf`."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlcpipe.errors import CompileError, last_line
from mlcpipe.host.cpu_features import architecture, architecture_of
from mlcpipe.host.finding import Finding
from mlcpipe.support.compiled import POOL_SOURCES, compiled_pool
from mlcpipe.version import __version__

LINK_TIMEOUT_S = 600
ANDROID = "android"
_GLIBC = "2.28"  # for Linux on other machines: Debian 10 and later
# The threads of the library's parallel loops; Windows keeps TVM's.
POOL = POOL_SOURCES[0]


@dataclass(frozen=True)
class Linker:
    """A command that compiles C and links; its version for the manifest, and its target system."""

    name: str
    version: str
    command: tuple[str, ...]
    system: str = sys.platform

    @property
    def links(self) -> bool:
        """Whether it makes shared libraries: those for iOS need Apple's SDK."""
        return self.system != "ios"

    def link(self, objects: Sequence[Path], output: Path) -> None:
        """Link `objects` into the shared library `output`. Raises CompileError with the linker's final error line."""
        shared = ["-shared", "-fPIC"] if self.system != "win32" else ["-shared"]
        # No path of this machine gets into a library: zig would keep those of sources, and the output as its name.
        darwin = ["-undefined", "dynamic_lookup", "-Wl,-x", "-g0", f"-Wl,-install_name,@rpath/{output.name}"]
        system = {"darwin": darwin, "win32": []}.get(self.system, ["-Wl,-s"])
        pool = [] if self.system == "win32" else ["-O2", "-pthread", str(POOL)]
        self.run([*shared, *system, "-o", str(output), *map(str, objects), *pool])

    def compile(self, source: Path, output: Path) -> None:
        """Compile a C source to an object file. Raises CompileError."""
        self.run(["-O2", "-fPIC", "-c", str(source), "-o", str(output)])

    def program(self, sources: Sequence[Path], include: Sequence[Path | str], output: Path) -> None:
        """Link C sources and objects into a static program. Raises CompileError."""
        flags = ["-std=gnu11", "-O2", "-static", "-pthread", "-w", *(f"-I{path}" for path in include)]
        self.run([*flags, *map(str, sources), "-lm", "-o", str(output)])

    def archive(self, objects: Sequence[Path], output: Path) -> None:
        """Archive `objects` as the static library `output`; the command must be an archiver. Raises CompileError."""
        self.run(["rcs", str(output), *map(str, objects)])

    def run(self, arguments: Sequence[str]) -> None:
        """Run the command. Raises CompileError with its first error, or the final line of its output."""
        try:
            done = subprocess.run(
                [*self.command, *arguments], capture_output=True, text=True, timeout=LINK_TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CompileError(
                f"linker {self.name} cannot run", found=error, next_step="see `mlcpipe doctor`"
            ) from error
        if done.returncode:
            printed = done.stderr or done.stdout or "no message"
            message = next((line for line in printed.splitlines() if " error: " in line), last_line(printed))
            raise CompileError(f"linker {self.name} failed", found=message, next_step="see `mlcpipe doctor`")


@dataclass(frozen=True)
class OwnLinker(Linker):
    """`mlcpipe.compiler.elf`, for this machine; `pool` has the threads of parallel loops, which it cannot compile."""

    pool: Path = Path()

    def link(self, objects: Sequence[Path], output: Path) -> None:
        from mlcpipe.compiler.elf.shared import link  # needs numpy, which no other linker does

        link([*objects, self.pool], output)

    def run(self, arguments: Sequence[str]) -> None:
        raise CompileError("no C compiler", expected="cc, or ziglang", next_step="pip install 'mlcpipe[zig]'")


def find_linker(triple: str | None = None) -> Linker:
    """`cc` (or `clang`, `gcc`) on the path, else `python -m ziglang cc`; for Linux on another machine ziglang.

    Where there is neither, a wheel for Linux needs none.

    `triple` is LLVM's name of the system and architecture to link for, None this machine's. For iOS the command only
    compiles. Raises CompileError that names the command to install one.
    """
    arch = architecture() if triple is None else architecture_of(triple)
    if triple is not None and "ios" in triple:
        return _ios_compiler(triple)
    here = (arch, sys.platform) == (architecture(), "linux") and not (triple or "").endswith(ANDROID)
    if triple is not None and "linux" in triple and not here:
        if (zig := find_zig()) is None:
            raise CompileError(f"no linker for {triple}", expected="ziglang", next_step="pip install 'mlcpipe[zig]'")
        abi, system = (ANDROID, ANDROID) if triple.endswith(ANDROID) else (f"gnu.{_GLIBC}", "linux")
        return replace(zig, command=(*zig.command, "-target", f"{arch}-linux-{abi}"), system=system)
    for name in ("cc", "clang", "gcc"):
        path = shutil.which(name)
        if path is not None:
            version = _version((path, "--version"))
            if version is not None:
                return Linker(name, version, (path,))
    zig = find_zig()
    if zig is not None:
        return zig
    if (pool := compiled_pool()) is not None:
        return OwnLinker("mlcpipe", __version__, (), pool=pool)
    raise CompileError(
        "no linker", expected="cc, clang or gcc on the path, or ziglang", next_step="pip install 'mlcpipe[zig]'"
    )


def _ios_compiler(triple: str) -> Linker:
    """ziglang for C without system headers. It cannot link for iOS, which needs Apple's SDK."""
    if (zig := find_zig()) is None:
        raise CompileError(f"no compiler for {triple}", expected="ziglang", next_step="pip install 'mlcpipe[zig]'")
    version = triple.partition("ios")[2]
    command = (*zig.command, "-target", f"aarch64-ios.{version}", "-ffreestanding")
    return replace(zig, command=command, system="ios")


def find_cxx(target: str | None = None) -> Linker:
    """A compiler of C++17, which links too: `c++`, `g++` or `clang++`, else `python -m ziglang c++`.

    For another machine (`target` such as `aarch64-linux-musl`) it is ziglang. Raises CompileError if there is none.
    """
    for name in ("c++", "g++", "clang++") if target is None else ():
        if (path := shutil.which(name)) is not None and (version := _version((path, "--version"))) is not None:
            return Linker(name, version, (path,))
    if (zig := find_zig()) is None:
        raise CompileError("no C++ compiler", expected="c++, or ziglang", next_step="pip install 'mlcpipe[zig]'")
    options = () if target is None else ("-target", target)
    return replace(zig, command=(*zig.command[:-1], "c++", *options), system="linux")


def find_linux_linker(arch: str) -> Linker | None:
    """The cross gcc for static Linux programs on `arch`, else ziglang with musl, or None."""
    gcc = shutil.which(f"{arch.replace('_', '-')}-linux-gnu-gcc") or shutil.which(f"{arch}-linux-gnu-gcc")
    if gcc is not None:
        return Linker(Path(gcc).name, "", (gcc,), "linux")
    zig = find_zig()
    return zig and replace(zig, command=(*zig.command, "-target", f"{arch}-linux-musl"), system="linux")


def linker_finding() -> Finding:
    """The linker, for `mlcpipe doctor`."""
    try:
        return Finding("linker", "ok", f"{(linker := find_linker()).name}: {linker.version}")
    except CompileError as error:
        return Finding("linker", "missing", error.what, error.next_step or "")


def find_zig() -> Linker | None:
    """PyPI's ziglang, or None."""
    if importlib.util.find_spec("ziglang") is None:
        return None
    version = _version((sys.executable, "-m", "ziglang", "version"))
    return None if version is None else Linker("ziglang", version, (sys.executable, "-m", "ziglang", "cc"))


def _version(command: tuple[str, ...]) -> str | None:
    """First line of the version, or None if the command fails (the `cc` of a bare macOS only asks for Xcode)."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return (done.stdout.strip().splitlines() or ["unknown"])[0] if done.returncode == 0 else None


def find_archiver(problem: str = "nothing makes static libraries") -> Linker:
    """PyPI's ziglang as an archiver for any system. Raises CompileError if it is not installed."""
    if (zig := find_zig()) is None:
        raise CompileError(problem, expected="ziglang", next_step="pip install 'mlcpipe[zig]'")
    return replace(zig, command=(*zig.command[:-1], "ar"))


def library_name(stem: str, system: str = sys.platform) -> str:
    """File name of a shared library of a system."""
    return stem + {"win32": ".dll", "darwin": ".dylib"}.get(system, ".so")


def object_format() -> str:
    """Suffix of this system's object files."""
    return "obj" if os.name == "nt" else "o"


def export_library(module: Any, objects: Sequence[Path], output: Path, linker: Linker, target: Any) -> None:
    """Write a module of compiled Relax executables as the shared library `output`, made for the TVM target.

    `objects` are the files of its static libraries, the baseline variant's first: TVM emits float16 conversions into
    each of them under the same weak names, a linker keeps the first, and all variants call that.
    Raises CompileError.
    """
    with tempfile.TemporaryDirectory() as folder:
        linker.link([*objects, imports_object(module, Path(folder), target)], output)


def imports_object(module: Any, folder: Path, target: Any) -> Path:
    """An object file with the other parts of a module: executables as bytes, and the imports."""
    import tvm

    path = folder / f"imports.{object_format()}"
    packed = tvm.get_global_func("runtime.ModulePackImportsToLLVM")(module, False, str(target), "")
    packed.write_to_file(str(path))
    return path


def export_device_library(
    module: Any, output: Path, linker: Linker, triple: str, finish: Callable[[Sequence[Path]], None] | None = None
) -> None:
    """Write a module of host code and kernels for a device as the shared library `output`. Raises CompileError.

    `finish` may edit the object files before they are linked.
    """

    def fcompile(target: str, files: Sequence[str], options: object = None, **_: object) -> None:
        paths = [Path(file) for file in files]
        if finish is not None:
            finish(paths)
        linker.link(paths, Path(target))

    _export(module, fcompile, output, triple)


def export_objects(module: Any, write: Callable[[Sequence[Path]], None], triple: str) -> None:
    """Call `write` with the temporary object files of a module of host code and kernels."""

    def fcompile(target: str, files: Sequence[str], options: object = None, **_: object) -> None:
        write([Path(file) for file in files])
        Path(target).touch()

    with tempfile.TemporaryDirectory() as folder:
        _export(module, fcompile, Path(folder, "module.so"), triple)


def _export(module: Any, fcompile: Any, output: Path, triple: str) -> None:
    fcompile.object_format = object_format()
    fcompile.get_target_triple = lambda: triple
    module.export_library(str(output), fcompile=fcompile)
