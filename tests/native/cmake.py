"""CMake, and the compilers that it runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.clang import system_clang

# After the project's own flags, among which is -Os.
_COMPILE = "{} <CMAKE_{}_COMPILER> <DEFINES> <INCLUDES> <FLAGS> -O0 -o <OBJECT> -c <SOURCE>"
# Runs a compiler, but of TVM's part of the runtime only its preprocessor: what it would make is $1.
_LAUNCHER = """made=$1; shift
case "$*" in
  *tvm.cc) "$@" -E && while [ "$1" != -o ]; do shift; done && cp "$made" "$2" ;;
  *) exec "$@" ;;
esac
"""


def run(*command: object, **variables: str) -> str:
    """What a command prints; no Python of this environment is on its path."""
    path = os.pathsep.join(p for p in os.environ["PATH"].split(os.pathsep) if Path(p) != Path(sys.executable).parent)
    environment = {**os.environ, "PATH": path, **variables}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


def tool(name: str) -> str:
    """The path of a tool of PyPI's or the system's."""
    path = shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if path is None:
        pytest.skip(f"{name}: cmake and ninja are on PyPI")
    return path


def compilers(name: str) -> dict[str, str]:
    """CC and CXX of gcc, clang or zig."""
    if name == "zig":
        return {"CC": f"{sys.executable} -m ziglang cc", "CXX": f"{sys.executable} -m ziglang c++"}
    path = shutil.which("gcc") if name == "gcc" else system_clang()
    if path is None:
        pytest.skip("g++" if name == "gcc" else name)
    return {"CC": path, "CXX": path.replace("clang", "clang++") if name == "clang" else path.replace("gcc", "g++")}


def build(
    source: Path,
    folder: Path,
    variables: Mapping[str, str],
    options: Sequence[str] = (),
    flags: str = "",
    tvm: Path | None = None,
) -> Path:
    """Build a project without warnings of the compiler, in little time; `flags` are more options of it.

    `tvm` is the object file of TVM's part of the runtime where it is not compiled again.
    """
    launcher = ""
    if tvm is not None:
        folder.mkdir()
        (folder / "launcher.sh").write_text(_LAUNCHER)
        launcher = f"sh {folder / 'launcher.sh'} {tvm}"
    words = [f"-DCMAKE_{language}_FLAGS=-Wall -Wextra -Werror {flags}" for language in ("C", "CXX")]
    words += [f"-DCMAKE_{language}_COMPILE_OBJECT={_COMPILE.format(launcher, language)}" for language in ("C", "CXX")]
    ninja = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}"]
    run(tool("cmake"), "-S", source, "-B", folder, *ninja, *words, *options, **variables)
    run(tool("cmake"), "--build", folder, **variables)
    return folder
