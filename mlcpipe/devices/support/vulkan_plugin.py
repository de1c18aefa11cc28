"""TVM's device API for Vulkan, from `mlcpipe/native/vulkan`: TVM's wheel has no Vulkan runtime.

Wheels for Linux bring it compiled for the one TVM that they ask for. Elsewhere, as in a source tree, it is compiled on
first use and kept in the cache. A change of sources, compiler or TVM changes the file's name, so none is ever stale.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import secrets
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from filelock import FileLock

from mlcpipe.devices.support import tvm_runtime
from mlcpipe.errors import TargetError
from mlcpipe.support import compiled
from mlcpipe.support.env import env
from mlcpipe.support.private import check_private, private_folder
from mlcpipe.support.resources import native_path

COMPILE_TIMEOUT_S = 600
_NATIVE = native_path()
_SOURCES = _NATIVE / "vulkan"
_SHIM = _NATIVE / "tvm_shim" / "include"
_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-w")
PLUGIN = "vulkan"  # the start of the wheel's file
_PROBE = "#include <vulkan/vulkan.h>\n#if __cplusplus < 202002L\n#error C++20\n#endif\n"
# Package manager -> its packages.
_INSTALL = {
    "apt-get": "apt-get install g++ libvulkan-dev",
    "dnf": "dnf install gcc-c++ vulkan-headers",
    "pacman": "pacman -S gcc vulkan-headers",
    "zypper": "zypper install gcc-c++ vulkan-devel",
    "apk": "apk add g++ vulkan-headers",
}


@dataclass(frozen=True)
class Compiler:
    """A C++20 compiler that finds Vulkan's headers."""

    path: str
    version: str


def folder() -> Path:
    """The folder of the plugin and of the drivers' compiled kernels."""
    return env().cache_dir / "vulkan"


def find_compiler() -> Compiler:
    """The first of `c++`, `g++`, `clang++` that works. Raises TargetError with the command to install one."""
    if sys.platform != "linux":
        raise TargetError("Vulkan", expected="Linux", found=sys.platform, next_step="use --target cpu")
    found = None
    for name in ("c++", "g++", "clang++"):
        path = shutil.which(name)
        words = _run((path, "--version")) if path else None
        if path is None or words is None:
            continue
        found = path
        if _run((path, "-std=c++20", "-x", "c++", "-E", "-"), _PROBE) is not None:
            return Compiler(path, (words.splitlines() or ["unknown"])[0])
    lacks = "Vulkan's headers, or a C++20 compiler newer than this one" if found else "a C++ compiler"
    raise TargetError(
        "the Vulkan plugin cannot be compiled", expected=lacks, found=_other_plugin() or None,
        next_step=install_command(),
    )  # fmt: skip


def install_command() -> str:
    """The command that installs a compiler and the headers on this system."""
    manager = next((name for name in _INSTALL if shutil.which(name)), "apt-get")
    return _INSTALL[manager]


def of_wheel() -> Path | None:
    """The plugin that the wheel brought, if it is of these sources and for the installed TVM."""
    return compiled.compiled(PLUGIN, digest(), ".so")


def digest() -> str:
    """What a plugin for Python is made from: sources and the versions of TVM."""
    sources = sorted([*_SOURCES.glob("*.h"), *_SOURCES.glob("*.cc"), *_SHIM.rglob("*.h")])
    return compiled.digest_of(sources, [f"{name} {version(name)}" for name in ("apache-tvm", "apache-tvm-ffi")])


def check() -> None:
    """Raises TargetError if there is no plugin and nothing that compiles it."""
    if of_wheel() is None:
        find_compiler()


def origin() -> str:
    """Where the plugin is from, for people. Raises TargetError as `build` does."""
    path = build()
    if path == of_wheel():
        return f"of the wheel, {path}"
    return f"{path}, compiled here{f': {other}' if (other := _other_plugin()) else ''}"


def _other_plugin() -> str:
    if compiled.unfit(PLUGIN, ".so"):
        return "the wheel's plugin is of other sources, or for another TVM"
    return ""


def build() -> Path:
    """The wheel's plugin, or one compiled here, if necessary now. Raises TargetError.

    Several processes may call it at once: one compiles, the others wait for it.
    """
    if (found := of_wheel()) is not None:
        return found
    compiler = find_compiler()
    path = _path(compiler)
    if path.exists():
        return path
    try:
        private_folder(path.parent)
        with FileLock(path.with_suffix(".lock")):
            if not path.exists():
                _compile(compiler, path)
    except OSError as error:
        raise TargetError("the Vulkan plugin cannot be kept", where=path, found=error.strerror) from error
    return path


@functools.cache
def load() -> None:
    """Make the device type `vulkan` known to TVM: `device_api.vulkan` and `mlcpipe.vulkan.*`. Raises TargetError.

    On a machine without Vulkan it loads, too, without devices.
    """
    path = build()
    if path != of_wheel():
        check_private(path, env().cache_dir, TargetError)
    tvm_runtime.load()
    try:
        ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_LOCAL)
    except OSError as error:
        raise TargetError(
            "the Vulkan plugin does not load",
            where=path,
            found=error,
            next_step="install mlcpipe again" if path == of_wheel() else "delete it, one is compiled then",
        ) from error
    tvm_runtime.function("mlcpipe.vulkan.configure")(str(folder()), env().vulkan_validation)


def _path(compiler: Compiler) -> Path:
    words = [digest(), compiler.path, compiler.version, *_FLAGS, *map(str, _packages())]
    return folder() / f"plugin-{compiled.digest_of((), words)}.so"


def _packages() -> tuple[Path, Path]:
    """Folders of the packages tvm and tvm_ffi, without importing them."""
    folders = []
    for name in ("tvm", "tvm_ffi"):
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise TargetError(f"the package {name} is not installed", next_step="mlcpipe doctor says what to install")
        folders.append(Path(spec.origin).parent)
    return folders[0], folders[1]


def _compile(compiler: Compiler, path: Path) -> None:
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}-{secrets.token_hex(4)}")
    includes = [f"-I{_SHIM}", *(f"-I{package / 'include'}" for package in _packages())]
    libraries = [flag for package in _packages() for flag in (f"-L{package / 'lib'}", f"-Wl,-rpath,{package / 'lib'}")]
    command = [compiler.path, *_FLAGS, *includes, str(_SOURCES / "plugin.cc"), "-o", str(partial), *libraries]
    command += ["-ltvm_runtime", "-ltvm_ffi", "-ldl", "-pthread"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "error" in line] or ["no message"]
            raise TargetError("the Vulkan plugin does not compile", where=compiler.version, found=errors[0])
        os.replace(partial, path)
    except subprocess.TimeoutExpired as error:
        raise TargetError("the Vulkan plugin does not compile", found=f"no end in {COMPILE_TIMEOUT_S} s") from error
    finally:
        partial.unlink(missing_ok=True)


def _run(command: tuple[str, ...], text: str = "") -> str | None:
    """The output of a command, None if it fails."""
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
