"""Shows what decoding loses when other processes take cores.

    python -m bench.busy_core [--hogs 0,1,2] [--json]

Next to each runtime 0, 1, 2 ... processes spin, started by the same program, so that the system weighs all threads
alike. Decoding with `threads` threads on as many processors then has a fair share of
threads / (threads + hogs) of the machine; a runtime whose threads wait for each other by spinning, or whose work is
split before it starts, gets less. What is missing is made as for `bench_peers`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from bench.bench_peers import options_of
from bench.prepare import Places, default_work, prepare, subject
from bench.program import command_line, run_program
from bench.quiet import run_measured, wait_until_quiet
from bench.runners import Cell, Effort, Runner
from mlcpipe.host.cpu import core_counts

_CELL = Cell("decode", 0)
_SPIN = "while True: pass"


@dataclass(frozen=True)
class Loss:
    """Median tokens per second next to `hogs` spinning processes, as a share of the same runtime's quiet speed.

    `low` and `high` are the slowest and fastest repeat of all rounds.
    """

    runtime: str
    hogs: int
    median: float
    low: float
    high: float
    share: float
    fair: float


def fair_share(threads: int, hogs: int, processors: int) -> float:
    """The share that `threads` of `threads + hogs` equal threads get, relative to running alone, on `processors`.

    Each thread gets one processor, or its part of all of them where there are more threads than processors.
    """
    alone = min(1.0, processors / threads)
    return min(1.0, processors / (threads + hogs)) / alone


@contextlib.contextmanager
def hogs(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """`count` processes that do nothing but use a processor."""
    running = [subprocess.Popen([sys.executable, "-c", _SPIN]) for _ in range(count)]
    try:
        yield running
    finally:
        for process in running:
            process.kill()
            process.wait()


def measure(runners: Sequence[Runner], options: argparse.Namespace, processors: int) -> list[Loss]:
    """Measure all runtimes on the quiet machine, then with each number of hogs, `rounds` times, interleaved."""
    levels, threads = sorted({0, *options.hogs}), options.threads or processors
    medians: dict[tuple[str, int], list[float]] = {}
    extremes: dict[tuple[str, int], list[float]] = {}
    for _ in range(options.rounds):
        for count in levels:
            for runner in runners:
                wait_until_quiet(options.foreign, options.wait)
                with hogs(count):
                    measured = run_measured(runner.command([_CELL]), timeout_s=options.timeout)
                reading = runner.parse(measured.stdout, [_CELL]).readings[_CELL]
                key = runner.name, count
                medians.setdefault(key, []).append(reading.median)
                extremes.setdefault(key, []).extend((reading.low, reading.high))
                print(f"{runner.name} next to {count}: {reading.median:.1f} tok/s", file=sys.stderr)
    losses = []
    for runner in runners:
        alone = statistics.median(medians[runner.name, 0])
        for count in levels:
            key = runner.name, count
            median = statistics.median(medians[key])
            fair = fair_share(threads, count, processors)
            losses.append(Loss(*key, median, min(extremes[key]), max(extremes[key]), median / alone, fair))
    return losses


def table(losses: Sequence[Loss]) -> str:
    """Markdown, one line for each runtime and number of hogs."""
    lines = ["| decode | spinning processes | tok/s | lowest - highest | left | fair |", "|---|--:|--:|--:|--:|--:|"]
    lines += [
        f"| {x.runtime} | {x.hogs} | {x.median:.1f} | {x.low:.1f} - {x.high:.1f} | {x.share:.0%} | {x.fair:.0%} |"
        for x in losses
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Prepare, measure, report one model."""
    parser = command_line(__doc__)
    parser.add_argument("--hogs", type=lambda text: [int(n) for n in text.split(",")], default=[0, 1, 2])
    options = options_of(parser, None)
    effort = Effort(options.threads or core_counts()[0], options.repeats, options.decode_tokens)
    places = Places(options.work or default_work(), options.checkpoint, options.llama_bench)
    what = subject(options.models[0], options.quantizations[0])
    runners, _ = prepare(what, places, effort, options.runtimes)
    losses = measure(runners, options, core_counts()[1])
    content = json.dumps([asdict(loss) for loss in losses], indent=1) + "\n"
    sys.stdout.write(content if options.json else table(losses))


if __name__ == "__main__":
    run_program(main)
