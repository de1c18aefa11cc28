"""Object files to a shared library, with the system's compiler where there is one, else PyPI's ziglang."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlcpipe.errors import CompileError

LINK_TIMEOUT_S = 600
# The threads of the library's parallel loops; Windows keeps TVM's.
_POOL = Path(__file__).parent.parent / "native" / "pool.c"


@dataclass(frozen=True)
class Linker:
    """A command that compiles C and links, its version for the manifest, and the system that it links for."""

    name: str
    version: str
    command: tuple[str, ...]
    system: str = sys.platform

    def link(self, objects: Sequence[Path], output: Path) -> None:
        """Link `objects` into the shared library `output`. Raises CompileError with the linker's last words."""
        shared = ["-shared", "-fPIC"] if self.system != "win32" else ["-shared"]
        system = {"darwin": ["-undefined", "dynamic_lookup", "-Wl,-x"], "win32": []}.get(self.system, ["-Wl,-s"])
        pool = [] if self.system == "win32" else ["-O2", "-pthread", str(_POOL)]
        self._run([*shared, *system, "-o", str(output), *map(str, objects), *pool])

    def archive(self, objects: Sequence[Path], output: Path) -> None:
        """Put `objects` into the static library `output`, where the command is an archiver's. Raises CompileError."""
        self._run(["rcs", str(output), *map(str, objects)])

    def _run(self, arguments: Sequence[str]) -> None:
        try:
            done = subprocess.run(
                [*self.command, *arguments], capture_output=True, text=True, timeout=LINK_TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CompileError(
                f"linker {self.name} cannot run", found=error, next_step="see `mlcpipe doctor`"
            ) from error
        if done.returncode:
            words = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no message"]
            raise CompileError(f"linker {self.name} failed", found=words[0], next_step="see `mlcpipe doctor`")


def find_linker() -> Linker:
    """`cc` (or `clang`, `gcc`) on the path, else `python -m ziglang cc`.

    Raises CompileError that names the command to install one.
    """
    for name in ("cc", "clang", "gcc"):
        path = shutil.which(name)
        if path is not None:
            version = _version((path, "--version"))
            if version is not None:
                return Linker(name, version, (path,))
    zig = find_zig()
    if zig is not None:
        return zig
    raise CompileError(
        "no linker", expected="cc, clang or gcc on the path, or ziglang", next_step="pip install 'mlcpipe[zig]'"
    )


def find_zig() -> Linker | None:
    """PyPI's ziglang, or None."""
    if importlib.util.find_spec("ziglang") is None:
        return None
    version = _version((sys.executable, "-m", "ziglang", "version"))
    return None if version is None else Linker("ziglang", version, (sys.executable, "-m", "ziglang", "cc"))


def _version(command: tuple[str, ...]) -> str | None:
    """First line of the version, or None when the command does not work (macOS has a `cc` that only asks for Xcode)."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return (done.stdout.strip().splitlines() or ["unknown"])[0] if done.returncode == 0 else None


def library_name(system: str = sys.platform) -> str:
    """File name of the library in a bundle made for a system."""
    return {"win32": "model.dll", "darwin": "model.dylib"}.get(system, "model.so")


def object_format() -> str:
    """Suffix of object files that this system's linker takes."""
    return "obj" if os.name == "nt" else "o"


def export_library(module: Any, objects: Sequence[Path], output: Path, linker: Linker, triple: str) -> None:
    """Write a module of compiled Relax executables as the shared library `output`, made for `triple`.

    `objects` are the files of its static libraries, the one that every machine runs first: TVM puts conversions of
    float16 into each of them under one weak name, a linker takes the first, and all variants call it.
    Raises CompileError.
    """

    def fcompile(target: str, files: Sequence[str], options: object = None, **_: object) -> None:
        *copies, imports = map(Path, files)  # export_library's copies of `objects`, in an order of its own
        if len(copies) != len(objects):
            raise CompileError("linking", expected=f"{len(objects)} object files", found=len(copies))
        linker.link([*objects, imports], Path(target))

    _export(module, fcompile, output, triple)


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


def export_archive(module: Any, output: Path, archiver: Linker, triple: str) -> None:
    """Write a module whose functions register themselves as the static library `output`. Raises CompileError."""

    def fcompile(target: str, files: Sequence[str], options: object = None, **_: object) -> None:
        archiver.archive([Path(file) for file in files], Path(target))

    _export(module, fcompile, output, triple)


def _export(module: Any, fcompile: Any, output: Path, triple: str) -> None:
    fcompile.object_format = object_format()
    fcompile.get_target_triple = lambda: triple
    module.export_library(str(output), fcompile=fcompile)
