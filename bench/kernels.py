"""Speed of the timed kernel cases, compared with this machine's limits: `python -m bench.kernels [part of a name]`.

Each case as GB/s of what it must read and write, or GFLOP/s, with the share of the ceiling that limits it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Mapping
from typing import Any

from bench.ceiling import arithmetic_ceilings
from mlcpipe.devices.support.threads import use_threads
from mlcpipe.host.bandwidth import last_cache_bytes, read_bandwidth_gb_s
from mlcpipe.host.cpu import core_counts, cpu_model
from tests.kernels.cases.cpu import CASES
from tests.kernels.harness import Case, compile_together, functions_of, tensors

MIN_CALLS, MIN_SECONDS = 5, 0.3
COLD_CACHES, MAX_COPIES = 8, 256  # a last cache may keep part of what only just exceeds it


def main(arguments: list[str] | None = None) -> int:
    """Print one line a case; 1 if no case has that name."""
    parser = argparse.ArgumentParser(prog="python -m bench.kernels", description=__doc__)
    parser.add_argument("name", nargs="?", default="", help="only cases whose name contains this")
    parser.add_argument("--threads", type=int, default=core_counts()[0], help="default: the physical cores")
    options = parser.parse_args(arguments)
    cases = [case for case in CASES if case.timed and options.name in case.name]
    if not cases:
        sys.stderr.write(f"no timed case has {options.name!r} in its name\n")
        return 1
    use_threads(options.threads)
    ceilings = {"memory": read_bandwidth_gb_s(options.threads), **arithmetic_ceilings(options.threads)}
    found = ", ".join(
        f"{name} {value:.0f} {'GB/s' if name == 'memory' else 'GFLOP/s'}" for name, value in ceilings.items()
    )
    sys.stdout.write(f"{cpu_model()}, {options.threads} threads: {found}\n")
    kernels = compile_together(functions_of(cases))
    width = max(len(case.name) for case in cases)
    for case in cases:
        sys.stdout.write(f"{case.name:{width}}  {line(case, kernels, ceilings, options.threads)}\n")
        sys.stdout.flush()
    return 0


def line(case: Case, kernels: Mapping[str, Any], ceilings: Mapping[str, float], threads: int) -> str:
    """Median time, then the rate and the share of the ceiling that allows less: the memory's or the arithmetic's.

    The memory's is measured again after a kernel that it limits: on shared machines it changes within seconds.
    """
    seconds = statistics.median(measure(case, kernels[case.kernel.symbol]))
    rates = {"memory": case.nbytes / seconds / 1e9, case.arithmetic: case.flops / seconds / 1e9}
    limit = max(rates, key=lambda name: rates[name] / ceilings[name])
    if limit == "memory":
        ceilings = {**ceilings, "memory": read_bandwidth_gb_s(threads)}
    unit = "GB/s" if limit == "memory" else "GFLOP/s"
    return f"{seconds * 1e6:10.1f} us  {rates[limit]:8.1f} {unit:7}  {100 * rates[limit] / ceilings[limit]:5.1f} % of {ceilings[limit]:.0f} ({limit})"


def measure(case: Case, kernel: Any) -> list[float]:
    """Seconds of each call after a warm-up; calls cycle through copies that together exceed all caches."""
    args = case.call().args
    copies = min(-(-COLD_CACHES * last_cache_bytes() // max(case.nbytes, 1)), MAX_COPIES)
    sets = [tensors(args) for _ in range(max(1, copies))]
    kernel(*sets[-1])
    seconds: list[float] = []
    began = time.perf_counter()
    while len(seconds) < MIN_CALLS or time.perf_counter() - began < MIN_SECONDS:
        values = sets[len(seconds) % len(sets)]
        start = time.perf_counter()
        kernel(*values)
        seconds.append(time.perf_counter() - start)
    return seconds


if __name__ == "__main__":
    sys.exit(main())
