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

import psutil

sys.modules["torch"] = None  # type: ignore[assignment]  # tvm_ffi would load it, a second for each of these processes

from mlcpipe import Engine, SamplingParams
from mlcpipe.errors import MlcpipeError, ResourceError
from mlcpipe.runtime import vulkan

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
    """Decode steps one by one: microseconds, best and median, and counts a step.

    "clock" is the whole step's, "thread" what this thread took of a processor, "gap" how long a device has nothing to do:
    from the end of a wait, for the token of the step before, to the first submission after it.
    """
    engine, fake = Engine(bundle), ctypes.CDLL("libvulkan.so.1")
    fake.fake_gap.restype = ctypes.c_longlong
    engine.prefill([1, 2, 3])
    for _ in range(10):
        engine.decode(TOKEN)
    before, clock, thread, gap = vulkan.counts(vulkan.choose()), [], [], []
    for _ in range(count):
        began, began_here = time.perf_counter(), time.thread_time()
        engine.decode(TOKEN)
        clock.append((time.perf_counter() - began) * 1e6)
        thread.append((time.thread_time() - began_here) * 1e6)
        gap.append(fake.fake_gap() * 1e-3)
    after = vulkan.counts(vulkan.choose())
    times = {"clock": clock, "thread": thread, "gap": gap}
    return {
        **{name: [min(found), statistics.median(found)] for name, found in times.items()},
        "counts": {name: (after[name] - before[name]) / count for name in after},
    }


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
