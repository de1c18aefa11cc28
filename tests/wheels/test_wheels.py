"""Wheels for Linux: what they bring needs no newer system than TVM's wheel, and no compiler where they are installed."""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from mlcpipe.compiler.elf.objects import read_objects
from mlcpipe.compiler.link import find_linker
from mlcpipe.support import compiled
from tests.conftest import DEMO
from wheels import build, check

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="wheels for Linux are made there"),
    pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="ziglang compiles them"),
]
HERE, ROOT = platform.machine(), Path(build.__file__).parents[1]


@pytest.mark.full
@pytest.mark.parametrize("name", build.MACHINES)
def test_the_pool_of_each_machine(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object file without paths, whose name is found from the sources."""
    monkeypatch.setattr(build, "BUILT", tmp_path)
    machine = build.Machine(name)
    machine.folder.mkdir()
    made = build.compile_pool(machine)
    assert str(ROOT).encode() not in made.read_bytes()
    _, _, symbols = read_objects([made])
    assert {"__tvm_ffi_mlcpipe_threads", "__tvm_ffi_mlcpipe_watch_signals"} <= {
        one.name for one in symbols if one.exported
    }
    monkeypatch.setattr(compiled, "compiled_path", lambda: machine.folder)
    assert compiled.compiled_pool() == made and not compiled.unfit("vulkan", ".so")


@pytest.mark.full
def test_a_library_for_newer_systems_is_refused(tmp_path: Path) -> None:
    """By what this system's compiler links: its newest glibc, and a folder that only it has."""
    source, library, linker = tmp_path / "x.c", tmp_path / "x.so", find_linker()
    source.write_text("#include <stdio.h>\nint f(const char* x) { return puts(x); }\n")
    linker.run(["-shared", "-fPIC", str(source), "-o", str(library)])
    check.check_library(library)
    libraries, versions = check.needs(library)
    assert "libc.so.6" in libraries and any(version.startswith("GLIBC_2.") for version in versions)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit, match=r"x.so: it needs GLIBC_2"):
        patch.setitem(check.NEWEST, "GLIBC", (2, 1))
        check.check_library(library)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit, match=r"x.so: it needs libc.so.6"):
        patch.setattr(check, "ALLOWED", set())
        check.check_library(library)
    linker.run(["-shared", "-fPIC", str(source), "-Wl,-rpath,/opt/x", "-o", str(library)])
    with pytest.raises(SystemExit, match="it looks for libraries in a folder"):
        check.check_library(library)


@pytest.mark.everything
def test_the_plugin_for_arm64(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "BUILT", tmp_path)
    machine = build.Machine("aarch64")
    try:
        machine.headers()
    except SystemExit as error:
        pytest.skip(str(error))
    machine.folder.mkdir()
    made = build.compile_plugin(machine)
    check.check_library(made)
    libraries, versions = check.needs(made)
    assert {"libtvm_runtime.so", "libtvm_ffi.so", "libstdc++.so.6"} <= set(libraries) and "GLIBC_2.17" in versions
    assert made.read_bytes()[18:20] == b"\xb7\x00" and str(ROOT).encode() not in made.read_bytes()


# Of a program in an environment with nothing but Python's packages; ziglang is hidden, as tests' environment has it.
_START = """if True:
    import importlib.util, sys
    find = importlib.util.find_spec
    importlib.util.find_spec = lambda name, *rest: None if name == "ziglang" else find(name, *rest)
    from mlcpipe.cli import main
    sys.exit(main(sys.argv[1:]))"""


@pytest.mark.everything
@pytest.mark.parametrize("device", ["cpu", "vulkan"])
def test_a_wheel_needs_no_compiler(device: str, wheel: Path, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Built here, unpacked into an empty folder, with an empty PATH: it compiles the embedded model and chats."""
    if device == "vulkan":
        request.getfixturevalue("gpu")  # or it is skipped
    assert wheel.name.endswith(f"{build.Machine(HERE).tag}.whl")
    site, nothing = tmp_path / "site", tmp_path / "bin"
    zipfile.ZipFile(wheel).extractall(site)
    nothing.mkdir()
    environment = {"PATH": str(nothing), "HOME": str(tmp_path), "PYTHONPATH": str(site)}
    environment |= {key: value for key, value in os.environ.items() if key.startswith(("LD_", "VK_"))}

    def run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", _START, *words], cwd=tmp_path, env=environment, capture_output=True, text=True,
            timeout=600,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    doctor = " ".join(run("doctor").split())
    assert "linker mlcpipe" in doctor and ("the Vulkan plugin of the wheel" in doctor or device == "cpu")
    answer = run("chat", "--device", device, "--prompt", "What is mlcpipe?", str(DEMO))
    assert "turns a language model checkpoint into a program" in answer
    assert not list((tmp_path / ".cache" / "mlcpipe").glob("vulkan/plugin-*"))
