"""A decode step on a device: nothing is allocated or compiled, one number comes back, and the host adds little."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm_ffi

import mlcpipe
from mlcpipe import Engine, SamplingParams
from mlcpipe.bundle import read_manifest
from mlcpipe.devices import vulkan
from mlcpipe.devices.support import tvm_runtime
from tests.conftest import TinyLlama, write_llama
from tests.vulkan.conftest import Compiled, Start
from tests.vulkan.kernels import INCREMENT, module_bytes

pytestmark = pytest.mark.usefixtures("gpu")

ROOT = Path(__file__).parents[2]
STEPS = 150  # past 128 keys, from where attention has several parts
GREEDY = SamplingParams(temperature=0.0)
DRAWN = SamplingParams(temperature=0.8, top_k=50, top_p=0.9, repetition_penalty=1.2, frequency_penalty=0.3, seed=4)
MIB = 1 << 20
SMALL = f'base = "vulkan"\n[limits]\nmax_binding_bytes = {MIB}\n'
LARGE = TinyLlama(vocab_size=4096, hidden_size=128, head_dim=32, tied=False)  # 2 MiB of embedding, and of output


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("steps")
    checkpoint = write_llama(folder / "checkpoint")
    return mlcpipe.compile(checkpoint, target="vulkan", quantization="q4f32_1", output=folder / "bundle")


def since(before: Mapping[str, int], device: vulkan.Device) -> dict[str, int]:
    return {name: count - before[name] for name, count in vulkan.counts(device).items()}


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_a_step_allocates_and_compiles_nothing(bundle: Path, gpu: vulkan.Device, sampling: SamplingParams) -> None:
    engine = Engine(bundle)
    stream = engine.generate([7, 8, 9], sampling=sampling, max_tokens=STEPS, ignore_eos=True, stream=True)
    for _ in range(3):
        next(stream)
    before = vulkan.counts(gpu)
    for _ in range(100):
        next(stream)
    found = since(before, gpu)
    assert (found["buffers_made"], found["buffers_alive"], found["blocks"], found["pipelines_made"]) == (0, 0, 0, 0)
    assert found["downloaded_bytes"] == 4 * 100
    # A GPU, not a software device, starts on the first kernels while the host records the others: see Commands.
    assert found["submits"] <= 100 * (1 if gpu.kind == "software" else 3)
    for _ in range(40):  # attention gets a second part
        next(stream)
    assert since(before, gpu)["buffers_made"] == 0
    assert since(before, gpu)["pipelines_made"] == 0


def test_memory_of_a_model_is_given_back(bundle: Path, gpu: vulkan.Device) -> None:
    def answer() -> None:
        Engine(bundle).generate(list(range(140)), sampling=DRAWN, max_tokens=3, ignore_eos=True)
        gc.collect()
        where = tvm_ffi.device("vulkan", gpu.index)
        tvm_runtime.function("runtime.Device_StreamSync")(where, 0)  # what it still uses would be freed later
        tvm_runtime.release_pools()

    answer()
    grown = []
    for _ in range(3):
        before = vulkan.counts(gpu)
        answer()
        found = since(before, gpu)
        grown.append(max(found[name] for name in ("buffers_alive", "used_bytes", "pipelines_alive")))
    assert min(grown) <= 0, grown  # what is lost is lost each time


def test_copying_the_weights_is_reported(bundle: Path) -> None:
    class Reported:
        def __init__(self) -> None:
            self.stages: list[str] = []
            self.total, self.parts = 0, [0]

        def stage(self, name: str) -> None:
            self.stages.append(name)

        def bytes_total(self, n: int) -> None:
            self.total = n

        def advance(self, n: int) -> None:
            self.parts.append(n)

    reported = Reported()
    engine = Engine(bundle, progress=reported)
    assert [stage.split(" vulkan:0, ")[0] for stage in reported.stages] == [
        "compile the kernels on",
        "copy the weights to",
    ]
    assert reported.total == sum(reported.parts) == engine.manifest.memory_plan.weights_bytes


def test_kernels_can_be_measured(bundle: Path, gpu: vulkan.Device) -> None:
    engine = Engine(bundle)
    engine.prefill([1, 2, 3])
    began = time.monotonic()
    with vulkan.profiled(gpu) as times:
        token = engine.decode(5)
    elapsed_s = time.monotonic() - began
    before = vulkan.counts(gpu)
    assert engine.decode(token) >= 0
    launches = since(before, gpu)["dispatches"]
    assert sum(calls for calls, _ in times.values()) == launches
    assert all(seconds > 0 for _, seconds in times.values())
    assert sum(seconds for _, seconds in times.values()) < elapsed_s
    assert any("matmul" in name for name in times)


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with 2 MiB of embedding, in parts for devices that bind 1 MiB."""
    folder = tmp_path_factory.mktemp("split")
    checkpoint = write_llama(folder / "checkpoint", LARGE)
    (folder / "small.toml").write_text(SMALL, encoding="utf-8")
    made = mlcpipe.compile(
        checkpoint,
        target=str(folder / "small.toml"),
        quantization="q0f32",
        output=folder / "bundle",
        context_length=64,
    )
    sizes = [int(np.prod(param.shape)) * 4 for param in read_manifest(made).params]
    assert max(sizes) <= MIB < sum(sizes) // 4
    return made


@pytest.mark.parametrize("kind", ["4", "2"], ids=["unified", "discrete"])
def test_a_device_that_binds_little(beside_fake: Start, split: Path, kind: str) -> None:
    expected = Engine(split).generate([1, 2, 3], sampling=GREEDY, max_tokens=8, ignore_eos=True)
    fake = {"FAKE_RANGE": str(MIB), "FAKE_TYPES": kind}
    found = beside_fake("tests.vulkan.engine_scenario", "greedy", str(split), "8", **fake)
    assert found["tokens"] == expected.token_ids


def test_a_model_with_larger_weights_is_refused_in_words(beside_fake: Start, split: Path) -> None:
    found = beside_fake("tests.vulkan.engine_scenario", "greedy", str(split), "8", FAKE_RANGE=str(MIB // 2))
    assert "a tensor of 1.00 MiB is larger than llvmpipe" in found["error"]
    assert "allows: 512.0 KiB (maxStorageBufferRange)" in found["error"]


def test_a_driver_that_fails_while_a_model_loads_or_answers(beside_fake: Start, bundle: Path) -> None:
    """An error in words, and the process continues: the next load answers as ever."""
    found = beside_fake("tests.vulkan.engine_scenario", "faults", str(bundle), "10", watched=False)
    assert found["calls"] > 100
    assert found["wrong"] == []
    assert len(found["errors"]) >= 4  # the runtime makes good for some failures: staging that gets no memory, say
    for where, kind, words in found["errors"]:
        assert kind in ("ResourceError", "TargetError"), where
        # TVM's pool tries again on a device that was lost: then a kernel refuses the tensors that were lost with it.
        assert ("llvmpipe" in words or "of a device that was lost" in words) and "\n" not in words, where


@pytest.mark.alone
@pytest.mark.parametrize("kind", ["1", "2"], ids=["integrated", "discrete"])
def test_the_host_adds_little_to_a_step(beside_fake: Start, bundle: Path, compiled: Compiled, kind: str) -> None:
    """With kernels that do nothing, what is left of a step is the host's: Python, TVM, recording, submitting, waiting.

    A device computes while the host records; it has nothing to do from a token to the first submission (`gap`).
    """
    Engine(bundle)  # the driver passes its check here: kernels that do nothing would not
    (bundle.parent / "increment.bin").write_bytes(module_bytes([INCREMENT], bundle.parent))
    found: dict[str, Any] = beside_fake(
        "tests.vulkan.engine_scenario", "steps", str(bundle), "200", watched=False, FAKE_IDLE="1", FAKE_TYPES=kind
    )
    counts = found["counts"]
    assert (counts["buffers_made"], counts["pipelines_made"], counts["downloaded_bytes"]) == (0, 0, 4)
    assert counts["submits"] <= 3
    assert found["gap"] < 0.6 * found["clock"], found
    assert found["thread"] < 5 * found["launches"], found


def test_a_model_that_is_opened_again_while_it_is_open(bundle: Path, gpu: vulkan.Device) -> None:
    """The library's own variables refer to what both share, and outlive the first."""

    def answer(engine: Engine) -> list[int]:
        return engine.generate([1, 2, 3], sampling=GREEDY, max_tokens=4, ignore_eos=True).token_ids

    engine = Engine(bundle)
    expected = answer(engine)
    for _ in range(4):
        engine = Engine(bundle)  # the one before it is closed only now
        gc.collect()
        assert answer(engine) == expected
    alive = vulkan.counts(gpu)["pipelines_alive"]
    second = Engine(bundle)
    assert vulkan.counts(gpu)["pipelines_alive"] == alive
    del engine
    gc.collect()
    assert answer(second) == expected
    assert vulkan.counts(gpu)["pipelines_alive"] == alive


@pytest.mark.parametrize("count", [20, pytest.param(1000, marks=pytest.mark.everything)])
def test_loading_and_unloading_leaves_nothing(bundle: Path, count: int) -> None:
    Engine(bundle)  # the driver passes its check here
    command = [sys.executable, "-m", "tests.vulkan.engine_scenario", "cycles", str(bundle), str(count)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20 * count + 300)
    assert done.returncode == 0, done.stderr
    grown = json.loads(done.stdout)
    for name in ("buffers_alive", "pipelines_alive", "used_bytes", "blocks", "block_bytes"):
        assert grown[name] <= 0, name
    assert grown["resident"] < 16 * MIB
