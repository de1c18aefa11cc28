"""The native runtime on Metal, whose GPU the CPU emulates: the same tokens, logits and files as Python on the same GPU.

What is not checked so: Apple's compiler and drivers, and `gpu.mm`, which calls Metal.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the checkpoints are written by torch")

import mlcpipe
from mlcpipe.bundle import read_manifest
from mlcpipe.compiler.link import find_zig
from tests.conftest import QUICK, TinyLlama, write_llama
from tests.emulator import cases
from tests.emulator.process import ROOT
from tests.metal import emulation
from tests.native.conftest import private_cache
from tests.native.engine import TARGET, NativeEngine, NativeError, Runtime

pytestmark = pytest.mark.full  # compiles TVM's runtime and every kernel of a model
# The code of iPhones with A17, but for this machine, so that both hosts load it.
TARGET_HERE = 'base = "metal-a17"\n[tvm.host]\nkind = "llvm"\nmtriple = "x86_64-unknown-linux-gnu"\n'
SCHEME, PROMPT, COUNT = "q4f16_1", list(range(5, 25)), 8
Copy = Callable[[Path], Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if reason := emulation.missing() or ("" if find_zig() else "static libraries need ziglang"):
        pytest.skip(reason)
    return tmp_path_factory.mktemp("metal")


@pytest.fixture(scope="module")
def checkpoint(folder: Path) -> Path:
    return write_llama(folder / "checkpoint", TinyLlama(hidden_size=128))


@pytest.fixture(scope="module")
def python(folder: Path, checkpoint: Path) -> dict[str, Any]:
    """A bundle, and what Python's engine computes with it on the emulated GPU."""
    job = {**cases.packed_job(checkpoint, TARGET_HERE, SCHEME), "greedy": [PROMPT, COUNT]}
    (made,) = emulation.run_engines(emulation.build_runtime(folder), [job], folder)
    return {**job, **made}


@pytest.fixture(scope="module")
def metal(folder: Path, shared: Path) -> Runtime:
    """The native runtime with the emulated GPU; `spoiled` has a word of kernels and what stands in its place."""
    from mlcpipe.compiler.link import find_cxx
    from mlcpipe.compiler.native_runtime import object_files

    compiler, library = find_cxx(), folder / "libmetal.so"
    objects = object_files(compiler, private_cache(shared), emulation.native_plugin())
    compiler.run(["-shared", "-pthread", *map(str, objects), "-ldl", "-o", str(library)])
    emulation.start_native(library, folder, lambda source: source.replace(*spoiled))
    return Runtime(library)


spoiled = ["", ""]


@pytest.fixture
def native(metal: Runtime, python: dict[str, Any], copy_of: Copy) -> NativeEngine:
    return metal.open(copy_of(python["bundle"]))


def test_tokens_and_logits_are_those_of_python(
    native: NativeEngine, python: dict[str, Any], checkpoint: Path, folder: Path
) -> None:
    """Within the bound of the CPU's engine, too."""
    assert (native.device, native.device_title) == ("metal", "an emulated GPU")
    assert native.generate(PROMPT, max_tokens=COUNT).tokens == python["tokens_after"].tolist()
    found = native.logits(python["tokens"])
    np.testing.assert_array_equal(found, python["all"])
    cases.equals_cpu_engine(checkpoint, SCHEME, {**python, "all": found}, folder)


def test_a_program_with_the_static_library(folder: Path, shared: Path, python: dict[str, Any], metal: Runtime) -> None:
    """As an app for iPhones has it."""
    from mlcpipe.compiler.container import write_container
    from mlcpipe.compiler.link import find_cxx
    from mlcpipe.compiler.native_runtime import object_files
    from mlcpipe.support.progress import SilentProgress

    compiler, app, bundle = find_cxx(), folder / "libapp.so", python["bundle"]
    objects = object_files(compiler, private_cache(shared), emulation.native_plugin())
    archive = ["-Wl,--whole-archive", str(bundle / "lib" / "libmodel.a"), "-Wl,--no-whole-archive"]
    compiler.run(["-shared", "-pthread", *map(str, objects), *archive, "-lm", "-ldl", "-o", str(app)])
    data = write_container(bundle, folder / "model.mlcp", SilentProgress())  # without code
    words = [app, folder, data, COUNT, *PROMPT]
    command = [sys.executable, "-m", "tests.native.metal_scenario", *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == {"device": "metal", "tokens": python["tokens_after"].tolist()}


def test_an_app_in_the_background(native: NativeEngine, metal: Runtime, python: dict[str, Any], tmp_path: Path) -> None:
    """Its GPU gets no commands; a chat that was saved continues when the app is back."""
    expected = python["tokens_after"].tolist()
    native.generate(PROMPT, max_tokens=4)
    native.save(tmp_path / "chat", {"messages": []})
    metal.call("set_background", 1)
    try:
        with pytest.raises(NativeError, match="an app in the background may not use Metal") as refused:
            native.generate(PROMPT, max_tokens=COUNT)
    finally:
        metal.call("set_background", 0)
    assert refused.value.code == TARGET
    assert native.restore(tmp_path / "chat") == {"messages": []}
    again = native.generate([*PROMPT, *expected[:3]], max_tokens=COUNT - 3)
    assert again.tokens == expected[3:] and again.cached_tokens == len(PROMPT) + 2


def test_a_gpu_that_fails(native: NativeEngine, metal: Runtime, python: dict[str, Any]) -> None:
    metal.library.emulated_metal_fail(ctypes.c_char_p(b"Caused GPU Timeout Error"))
    with pytest.raises(NativeError, match="the GPU an emulated GPU failed: Caused GPU Timeout Error") as failed:
        native.generate(PROMPT, max_tokens=COUNT)
    assert failed.value.code == TARGET
    assert native.generate(PROMPT, max_tokens=COUNT).tokens == python["tokens_after"].tolist()


def test_a_compiler_of_nonsense_is_refused(
    metal: Runtime, python: dict[str, Any], copy_of: Copy, tmp_path: Path
) -> None:
    """What passed is not checked again."""
    cache = tmp_path / "cache"
    spoiled[:] = [" - 7", " - 6"]  # of the driver check: codes of four bits
    try:
        with pytest.raises(NativeError, match="an emulated GPU computes wrong numbers in the driver check") as refused:
            metal.open(copy_of(python["bundle"]), cache=cache)
        assert refused.value.code == TARGET and not list(cache.glob("checked-*"))
    finally:
        spoiled[:] = ["", ""]
    metal.open(copy_of(python["bundle"]), cache=cache)
    assert list(cache.glob("checked-*"))


def test_what_runs_elsewhere(
    metal: Runtime, runtime: Runtime, python: dict[str, Any], checkpoint: Path, copy_of: Copy, tmp_path: Path
) -> None:
    """`auto` takes the CPU, which is faster than its emulation; a runtime without Metal says what it lacks."""
    bundle = copy_of(python["bundle"])
    assert metal.open(bundle, device="auto").device == "metal"
    cpu = mlcpipe.compile(checkpoint, target=QUICK, quantization=SCHEME, output=tmp_path / "cpu")
    engine = metal.open(copy_of(cpu), device="auto", gpu_path=bundle, cache=tmp_path / "cache")
    assert engine.device == "cpu"
    (choice,) = (tmp_path / "cache").glob("faster-*")
    assert "s on the GPU" in choice.read_text()
    with pytest.raises(NativeError, match="made for Metal; expected a runtime that was built with MLCPIPE_METAL"):
        runtime.open(bundle)


def test_memory_is_planned(metal: Runtime, python: dict[str, Any]) -> None:
    stated = read_manifest(python["bundle"])
    plan = metal.plan(python["bundle"], context_length=64)
    expected = (stated.memory_plan.weights_bytes, 80 * stated.kv_bytes_per_token)
    assert (plan.weights_bytes, plan.kv_bytes) == expected
    assert plan.fits and 0 < plan.free_bytes <= 8 << 30  # of the emulated GPU
