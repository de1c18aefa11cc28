"""Speed of the timed kernel cases beside what the memory gives: `python -m tests.kernels.bench [part of a name]`."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tvm

from mlcpipe.bandwidth import last_cache_bytes, read_bandwidth_gb_s
from mlcpipe.cli.machine import core_counts, cpu_model

from .cases import CASES
from .harness import Case, compile_kernels, tensors

MIN_CALLS, MIN_SECONDS = 5, 0.3
# Below this many operations a byte a kernel waits for memory, and GB/s tells more than GFLOP/s.
MEMORY_BOUND = 16


def main(arguments: list[str] | None = None) -> int:
    """Print one line a case; 1 if no case has that name."""
    parser = argparse.ArgumentParser(prog="python -m tests.kernels.bench", description=__doc__)
    parser.add_argument("name", nargs="?", default="", help="only cases whose name contains this")
    parser.add_argument("--threads", type=int, default=core_counts()[0], help="default: the physical cores")
    options = parser.parse_args(arguments)
    cases = [case for case in CASES if case.timed and options.name in case.name]
    if not cases:
        sys.stderr.write(f"no timed case has {options.name!r} in its name\n")
        return 1
    big_cores = 1
    tvm.get_global_func("runtime.config_threadpool")(big_cores, options.threads)
    ceiling = read_bandwidth_gb_s(options.threads)
    sys.stdout.write(f"{cpu_model()}, {options.threads} threads, memory reads {ceiling:.1f} GB/s\n")
    kernels = compile_kernels(cases)
    width = max(len(case.name) for case in cases)
    for case in cases:
        sys.stdout.write(f"{case.name:{width}}  {line(case, kernels, ceiling)}\n")
        sys.stdout.flush()
    return 0


def line(case: Case, kernels: Mapping[str, Any], ceiling: float) -> str:
    """Median time, and GB/s against `ceiling` or GFLOP/s."""
    seconds = statistics.median(measure(case, kernels[case.kernel.symbol]))
    text = f"{seconds * 1e6:10.1f} us"
    if case.flops < MEMORY_BOUND * case.nbytes:
        rate = case.nbytes / seconds / 1e9
        return f"{text}  {rate:8.1f} GB/s  {100 * rate / ceiling:5.1f} % of the memory's"
    return f"{text}  {case.flops / seconds / 1e9:8.1f} GFLOP/s"


def measure(case: Case, kernel: Any) -> list[float]:
    """Seconds of each call, after one to warm up, with inputs that the caches have forgotten where they could hold them."""
    values = tensors(case.call().args)
    forget = forgetting() if case.nbytes < last_cache_bytes() else None
    kernel(*values)
    seconds: list[float] = []
    began = time.perf_counter()
    while len(seconds) < MIN_CALLS or time.perf_counter() - began < MIN_SECONDS:
        if forget is not None:
            forget()
        start = time.perf_counter()
        kernel(*values)
        seconds.append(time.perf_counter() - start)
    return seconds


def forgetting() -> Callable[[], None]:
    """A function that reads more than the last caches hold."""
    words = np.ones(2 * max(last_cache_bytes(), 1 << 20) // 8, np.uint64)

    def read() -> None:
        np.bitwise_xor.reduce(words)

    return read


if __name__ == "__main__":
    sys.exit(main())
