"""A damaged manifest, index of weights or container is refused or opens; it never crashes or hangs."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import pytest
import tvm_ffi

from mlcpipe.compiler.container import write_container
from mlcpipe.compiler.native_runtime import RUNTIME_SOURCES, definitions
from mlcpipe.compiler.tvm_sources import INCLUDES, source_tree
from mlcpipe.support.progress import SilentProgress
from tests.conftest import Bundles
from tests.native.cxx import SANITIZED
from tests.native.fuzzing import FUZZ_S

SOURCES = (
    Path(__file__).with_name("bundle_fuzz.cc"),
    *sorted((RUNTIME_SOURCES / "bundle").glob("*.cc")),
    RUNTIME_SOURCES / "plan.cc",
    RUNTIME_SOURCES / "host.cc",
    RUNTIME_SOURCES / "host_memory.cc",
)
TIMEOUT_S = 30 * 60


@pytest.fixture
def files(tiny_bundles: Bundles, tmp_path: Path) -> list[Path]:
    """A bundle and a container of it."""
    bundle = tiny_bundles["q4f16_1"]
    return [bundle, write_container(bundle, tmp_path / "model.mlcp", SilentProgress())]


def program(folder: Path, *flags: str) -> Path:
    """Reads JSON with the parser of TVM's wheel."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++")
    library, names = Path(tvm_ffi.__file__).parent / "lib", definitions()[-2:]
    with source_tree().copied() as tree:
        include = [f"-I{RUNTIME_SOURCES}", *(f"-isystem{tree / name}" for name in INCLUDES)]
        linked = [f"-L{library}", "-ltvm_ffi", f"-Wl,-rpath,{library}"]
        command = [compiler, "-std=c++17", "-g1", "-Wall", "-Wextra", "-Werror", *flags, *names, *include]
        words = [*command, *map(str, SOURCES), "-o", str(folder / "fuzz"), *linked]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    if "cannot find -l" in done.stderr:
        pytest.skip("g++ has no sanitizers here")
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "fuzz"


def opened(program: Path, files: list[Path], count: int, seed: int) -> list[int]:
    """How many of `count` damaged manifests, indexes and containers opened."""
    words = [str(program), *map(str, files), str(count), str(seed)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert done.returncode == 0, f"seed {seed}: {done.stderr[-3000:]}"
    return [int(word) for word in done.stdout.split()]


@pytest.mark.full
def test_sanitizers_find_nothing(files: list[Path], tmp_path: Path) -> None:
    found = opened(program(tmp_path, *SANITIZED), files, 1000, 2)
    assert all(0 < number < 750 for number in found), found


@pytest.mark.everything
def test_sanitizers_find_nothing_in_a_long_time(files: list[Path], tmp_path: Path) -> None:
    built, seed, end = program(tmp_path, *SANITIZED), 3, time.monotonic() + FUZZ_S
    while time.monotonic() < end:
        opened(built, files, 20_000, seed)
        seed += 1
