"""What tests do with a whole model in a process of its own, with `fake_loader.c` under the plugin: NAME BUNDLE [NUMBER].

Prints one line of JSON.
"""

from __future__ import annotations

import ctypes
import gc
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

sys.modules["torch"] = None  # type: ignore[assignment]  # tvm_ffi would load it, a second for each of these processes

from mlcpipe import Engine, SamplingParams
from mlcpipe.devices import vulkan
from mlcpipe.errors import MlcpipeError, ResourceError
from tests.vulkan import gpu

GREEDY = SamplingParams(temperature=0.0)
TOKEN = 5
OUT_OF_MEMORY, LOST = -2, -4


def greedy(bundle: Path, count: int) -> dict[str, Any]:
    """The first tokens of an answer, or why there is none."""
    try:
        engine = Engine(bundle)
    except ResourceError as error:
        return {"error": str(error), "counts": vulkan.counts(vulkan.choose())}
    return {"tokens": engine.generate([1, 2, 3], sampling=GREEDY, max_tokens=count, ignore_eos=True).token_ids}


def steps(bundle: Path, count: int) -> dict[str, Any]:
    """Decode steps one by one: medians in microseconds, and counts a step.

    "clock" is the whole step's, "thread" what this thread took of a processor, "gap" how long a device has nothing to do:
    from the end of a wait, for the token of the step before, to the first submission after it. "launches" is what this
    thread took for the same number of launches called from Python, a wait, and a download, right after the step:
    whatever slows one, a busy neighbour or a cold cache, slows the other.
    """
    engine, fake = Engine(bundle), ctypes.CDLL("libvulkan.so.1")
    fake.fake_gap.restype = ctypes.c_longlong
    increment = vulkan.function("create_module")((bundle.parent / "increment.bin").read_bytes()).get_function(
        "increment"
    )
    tensor, device = gpu.upload(np.zeros(64, np.int32)), vulkan.choose()
    engine.prefill([1, 2, 3])
    for _ in range(10):
        before = vulkan.counts(device)
        engine.decode(TOKEN)
    each = {name: after - before[name] for name, after in vulkan.counts(device).items()}
    times: dict[str, list[float]] = {"clock": [], "thread": [], "gap": [], "launches": []}
    for _ in range(count):
        began, began_here = time.perf_counter(), time.thread_time()
        engine.decode(TOKEN)
        times["thread"].append(time.thread_time() - began_here)
        times["clock"].append(time.perf_counter() - began)
        times["gap"].append(fake.fake_gap() * 1e-9)
        began_here = time.thread_time()
        for _ in range(each["dispatches"]):
            increment(tensor, 64, 1, 64)
        gpu.download(tensor)
        times["launches"].append(time.thread_time() - began_here)
    return {**{name: statistics.median(found) * 1e6 for name, found in times.items()}, "counts": each}


def cycles(bundle: Path, count: int) -> dict[str, Any]:
    """So many times an engine, an answer, and nothing left of it: what has grown since the tenth part of them."""

    def state() -> dict[str, int]:
        gc.collect()
        return {**vulkan.counts(vulkan.choose()), "resident": psutil.Process().memory_info().rss}

    before: dict[str, int] = {}
    for i in range(count):
        if i == count // 10:
            before = state()
        Engine(bundle).generate([1, 2, 3], sampling=GREEDY, max_tokens=4, ignore_eos=True)
    return {name: number - before[name] for name, number in state().items()}


def faults(bundle: Path, count: int) -> dict[str, Any]:
    """Load and answer with one call of the driver failing, at so many places from the first call to the last.

    The device has no memory left, or is lost, in turn; after each, another load must answer as ever.
    """
    fake = ctypes.CDLL("libvulkan.so.1")
    fake.fake_calls.restype, fake.fake_fired_name.restype = ctypes.c_long, ctypes.c_char_p

    def answer() -> list[int]:
        return Engine(bundle).generate([1, 2, 3], sampling=GREEDY, max_tokens=4, ignore_eos=True).token_ids

    expected = answer()
    before = fake.fake_calls()
    answer()
    total, errors, wrong = fake.fake_calls() - before, [], []
    for i in range(count):
        fake.fake_arm(ctypes.c_long(total * i // count), ctypes.c_int((OUT_OF_MEMORY, LOST)[i % 2]))
        try:
            answers = [answer()]
        except MlcpipeError as error:
            errors.append([fake.fake_fired_name().decode(), type(error).__name__, str(error)])
            error.__traceback__, answers = None, []  # it holds the engine
        fake.fake_arm(ctypes.c_long(-1), ctypes.c_int(0))
        gc.collect()
        wrong += [found for found in (*answers, answer()) if found != expected]
    return {"calls": total, "errors": errors, "wrong": wrong}


if __name__ == "__main__":
    run = {f.__name__: f for f in (greedy, steps, cycles, faults)}[sys.argv[1]]
    sys.stdout.write(json.dumps(run(Path(sys.argv[2]), int(sys.argv[3]))))
