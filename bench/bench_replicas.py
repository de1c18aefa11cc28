"""Measures what a second replica gains: `mlcpipe serve --ray 2` with a thread each beside one server with one, in turn.

    python -m bench.bench_replicas BUNDLE [--loads 256/8,128/64] [--clients 16] [--requests 96] [--rounds 1]

A load is tokens of a prompt / of its answer. Prompts are new in every round. This program shares the processors.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
from argparse import Namespace
from contextlib import ExitStack
from pathlib import Path

from rich.table import Table

from bench.bench_native_serving import PORT, running
from bench.bench_peers import count
from bench.bench_serving import calibrate, lengths, measure, unseen
from bench.program import command_line, run_program
from bench.serving_client import Target, first_model
from mlcpipe.cli.terminal import stdout_console
from mlcpipe.errors import ResourceError

_NAMES = ("one server", "two replicas")


async def _requests_per_s(urls: list[str], options: Namespace) -> dict[str, list[list[float]]]:
    """Of each load and round, those of all servers. Raises ResourceError for a request that failed."""
    targets = [Target(url, "completions", await first_model(Target(url))) for url in urls]
    prompts = [await calibrate(target, 0) for target in targets]
    found: dict[str, list[list[float]]] = {}
    for load in options.loads:
        prompt, _, answer = load.partition("/")
        options.prompt_tokens, options.answer_tokens = lengths(prompt), lengths(answer)
        for round_ in range(options.rounds):
            rates = []
            for name, target, make in zip(_NAMES, targets, prompts):
                level = await measure(target, options, unseen(make, f"{load} {round_}"), "clients", options.clients)
                if level.failed:
                    raise ResourceError("requests failed", where=name, found=level.failed)
                print(f"{load} {name}: {level.requests_per_s:.2f} requests/s", file=sys.stderr)
                rates.append(level.requests_per_s)
            found.setdefault(load, []).append(rates)
    return found


def main() -> None:
    """Start the servers, measure, print a table of medians."""
    parser = command_line(__doc__)
    add = parser.add_argument
    add("bundle", type=Path)
    add("--loads", type=lambda text: text.split(","), default=["256/8", "128/64"])
    add("--clients", type=count, default=16)
    add("--requests", type=count, default=96)
    add("--rounds", type=count, default=1)
    parser.set_defaults(long_prompt=0)
    options = parser.parse_args()
    command = [sys.executable, "-m", "mlcpipe", "serve", str(options.bundle), "--port", PORT, "--threads", "1"]
    command += ["--context", "1024", "--sequences", str(options.clients)]
    with ExitStack() as servers:
        urls = [
            servers.enter_context(running(name, command + more)) for name, more in zip(_NAMES, ([], ["--ray", "2"]))
        ]
        found = asyncio.run(_requests_per_s(urls, options))
    table = Table("prompt / answer", *(f"{name}, requests/s" for name in _NAMES), "ratio", "of each round")
    for load, rounds in found.items():
        ratios = [two / one for one, two in rounds]
        rates = (f"{statistics.median(rates):.2f}" for rates in zip(*rounds))
        table.add_row(load, *rates, f"{statistics.median(ratios):.2f}×", " ".join(f"{ratio:.2f}" for ratio in ratios))
    stdout_console().print(table)


if __name__ == "__main__":
    run_program(main)
