"""What an engine holds: the runtime library without the compiler, and no memory that grows from call to call."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from mlcpipe import Engine, SamplingParams
from mlcpipe.bundle.memory import running_bytes
from mlcpipe.devices.support.tvm_runtime import trim
from mlcpipe.host.memory import private_memory_bytes

if TYPE_CHECKING:
    from tests.conftest import Bundles

ROOT = Path(__file__).parents[3]
MIB = 1 << 20
GREEDY = SamplingParams(temperature=0.0)
# In an interpreter of its own: the first answer without TVM's Python package, the second beside it.
ALONE = """
import json, sys
sys.modules["torch"] = None  # tvm_ffi imports it where it is installed
from mlcpipe import Engine, SamplingParams
def answer():
    done = Engine(sys.argv[1], threads=1).generate("Memory", sampling=SamplingParams(temperature=0.0), max_tokens=8)
    return done.token_ids
heavy = {"tvm", "mlcpipe.compiler", "tir_schedules.builder", "tir_schedules.cpu", "tir_schedules.gpu"}
alone, modules = answer(), heavy & set(sys.modules)
import tvm
print(json.dumps({"alone": alone, "modules": sorted(modules), "beside": answer()}))
"""
# Loads and unloads: what the process has after a tenth of the cycles, and after all.
CYCLES = """
import gc, json, sys
sys.modules["torch"] = None
import psutil
from mlcpipe import Engine, SamplingParams
process, count, states = psutil.Process(), int(sys.argv[2]), []
for i in range(1, count + 1):
    Engine(sys.argv[1]).generate("Memory", sampling=SamplingParams(temperature=0.0), max_tokens=2)
    if i in (count // 10, count):
        gc.collect()
        maps = len(open("/proc/self/maps").readlines())
        states.append([process.memory_info().rss, process.num_threads(), process.num_fds(), maps])
print(json.dumps(states))
"""


def private_growth(work: Callable[[], Any]) -> int:
    """By how many bytes private memory is larger after `work`."""
    gc.collect()
    trim()
    before = private_memory_bytes()
    work()
    gc.collect()
    trim()
    after = private_memory_bytes()
    if before is None or after is None:
        pytest.skip("the system does not tell private memory from mapped files")
    return after - before


@pytest.mark.full
def test_an_engine_does_without_the_compiler(tiny_bundles: Bundles) -> None:
    """In a process that only runs, and in one that imports TVM after the library was loaded."""
    bundle = tiny_bundles["q4f16_1"]
    expected = Engine(bundle, threads=1).generate("Memory", sampling=GREEDY, max_tokens=8).token_ids
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(bundle)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"alone": expected, "modules": [], "beside": expected}


def test_the_estimate_is_above_what_a_run_takes(demo_bundles: Bundles) -> None:
    """Prefill of a whole chunk, decoding with penalties, tokenizer: between half of the workspace and the estimate."""
    bundle, held = demo_bundles["q4f16_1"], []

    def run() -> None:
        engine = Engine(bundle)
        held.append(engine)
        sampling = SamplingParams(temperature=0.8, repetition_penalty=1.1, seed=0)
        engine.generate([3 + i % 900 for i in range(600)], sampling=sampling, max_tokens=8, ignore_eos=True)

    grown = private_growth(run)
    manifest = held[0].manifest
    kv = 608 * manifest.kv_bytes_per_token
    assert max(manifest.memory_plan.workspace_bytes.values()) / 2 < grown < running_bytes(manifest) + kv


def test_prompts_of_many_lengths_take_no_more_than_one(demo_bundles: Bundles) -> None:
    """The virtual machine's pool keeps memory by its size: the embeddings here were 12 MiB."""
    engine = Engine(demo_bundles["q4f16_1"], threads=1)

    def prompt(length: int) -> None:
        engine.reset()
        engine.prefill([3 + i % 900 for i in range(length)])

    prompt(512)
    assert private_growth(lambda: [prompt(length) for length in range(257, 512, 8)]) < 4 * MIB


def test_logits_of_all_tokens_are_not_kept(demo_bundles: Bundles) -> None:
    """For five lengths the pool had 19 MiB."""
    engine = Engine(demo_bundles["q4f16_1"], threads=1)

    def of_lengths(*lengths: int) -> None:
        for length in lengths:
            engine.logits([3] * length)

    of_lengths(400)
    assert private_growth(lambda: of_lengths(250, 300, 320, 340, 360)) < 4 * MIB


def test_a_new_engine_gets_the_memory_of_the_last_one(demo_bundles: Bundles) -> None:
    """KV cache and workspace: opening and closing leaves less than one more engine would hold."""

    def open_and_close() -> None:
        Engine(demo_bundles["q4f16_1"], threads=1).prefill([3] * 512)

    open_and_close()
    assert private_growth(lambda: [open_and_close() for _ in range(4)]) < 8 * MIB


@pytest.mark.skipif(sys.platform != "linux", reason="counts Linux's mappings")
@pytest.mark.full
@pytest.mark.parametrize("count", [30, pytest.param(1000, marks=pytest.mark.everything)])
def test_loading_and_unloading_leaves_nothing(demo_bundles: Bundles, count: int) -> None:
    """From the first tenth of the cycles on; 2 MiB in 201 cycles were seen, an engine has 20."""
    command = [sys.executable, "-c", CYCLES, str(demo_bundles["q4f16_1"]), str(count)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=10 * count + 300)
    assert done.returncode == 0, done.stderr
    (resident, threads, files, maps), last = json.loads(done.stdout)
    assert last[1:3] == [threads, files]
    assert last[3] <= maps + 8
    assert last[0] - resident < 8 * MIB
