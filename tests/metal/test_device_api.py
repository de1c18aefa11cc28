"""Our device API for Metal: it compiles for Apple's systems, and does with an emulated GPU what it shall."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlcpipe.compiler.link import find_zig
from tests.emulator.process import ROOT, run_compiler
from tests.metal.emulated_device import COUNT

METAL = ROOT / "mlcpipe" / "native" / "metal"
SHIM = ROOT / "mlcpipe" / "native" / "tvm_shim"
APPLE = Path(__file__).parent / "apple"
TRIPLES = ("arm64-apple-ios17.0.0", "arm64-apple-macos14.0.0")


# Each source for one system, and each system for one source.
SOURCES = sorted(path.name for path in METAL.glob("*.*") if path.suffix in (".cc", ".mm"))
SELDOM = {
    pair for i, pair in enumerate(product(SOURCES, TRIPLES)) if i // len(TRIPLES) % len(TRIPLES) != i % len(TRIPLES)
}


@pytest.mark.parametrize(
    ("source", "triple"),
    [pytest.param(*pair, marks=pytest.mark.everything if pair in SELDOM else ()) for pair in product(SOURCES, TRIPLES)],
)
def test_it_compiles_for_apples_systems(source: str, triple: str, tmp_path: Path) -> None:
    """Without warnings, by zig, against declarations of Metal's classes in the place of Apple's SDK."""
    zig = find_zig()
    if zig is None:
        pytest.skip("ziglang")
    packages = [Path(str(spec.origin)).parent for name in ("tvm", "tvm_ffi") if (spec := find_spec(name)) is not None]
    system = [SHIM, SHIM / "include", packages[0], *(package / "include" for package in packages), APPLE]
    words = [*zig.command[:-1], "c++", "-std=c++17", "-target", "aarch64-macos.14.0", "-Xclang", "-triple", "-Xclang"]
    flags = ["-O0", "-Wall", "-Wextra", "-Werror", f"-I{METAL}", *(f"-isystem{path}" for path in system)]
    language = ["-x", "objective-c++", "-fobjc-arc"] if source.endswith(".mm") else []
    run_compiler([*words, triple, *flags, *language, "-c", str(METAL / source), "-o", str(tmp_path / "made.o")])


@pytest.fixture(scope="module")
def made(runtime: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("device")
    command = [sys.executable, "-m", "tests.metal.emulated_device", str(runtime), str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    values: dict[str, Any] = json.loads((folder / "made.json").read_text())
    return values


def test_commands_run_in_order_and_before_the_cpu_reads_or_writes(made: dict[str, Any]) -> None:
    x = np.arange(COUNT, dtype=np.float32)
    once = x * np.where(np.arange(COUNT) < COUNT - 1, np.float32(2.5), np.float32(1))
    assert made["name"] == "an emulated GPU" and not made["missing"]
    assert made["copied"] == once.tolist() and made["twice"] == (once * np.float32(2.5)).tolist()
    assert made["written"] == x.tolist() and made["empty"] == []


def test_an_app_in_the_background_sends_no_commands(made: dict[str, Any]) -> None:
    assert all("an app in the background may not use Metal" in line for line in made["background"])
    assert made["read in the background"] == (np.arange(COUNT, dtype=np.float32) * np.float32(2.5)).tolist()
    assert made["back"] == ""


def test_what_fails_is_said_in_words(made: dict[str, Any]) -> None:
    assert made["failed"].endswith("the GPU an emulated GPU failed: Caused GPU Timeout Error") and made["after"] == ""
    assert "kernel scaled got no buffer of an emulated GPU as argument 0" in made["foreign"]
    assert "needs 512 threads in a threadgroup, at most 256" in made["threads"]
    assert made["memory"].startswith(
        "MemoryError: metal: no memory for a buffer of 68719476736 bytes on an emulated GPU"
    )


def test_libraries_that_cannot_be_used(made: dict[str, Any]) -> None:
    damaged, form, kernel, buffers, numbers = made["libraries"]
    assert "are damaged" in damaged and "found metallib" in form and "no kernel scaled" in kernel
    assert "31 buffers and 1 numbers" in buffers and "513 numbers" in numbers
