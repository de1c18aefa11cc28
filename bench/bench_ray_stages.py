"""Measures a model in stages on a Ray cluster of this machine beside one process, in turn: first token, tokens a second.

    python -m bench.bench_ray_stages WHOLE CUT [--clients 1,3] [--load 128/32] [--requests 6] [--rounds 3] [--threads 1]

WHOLE is a bundle for one device, CUT the same model in stages: each runs on a Ray node of its own, which are all on this
machine here, so that their processors and memory are shared. A load is tokens of a prompt / of its answer.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rich.table import Table

from bench.bench_native_serving import PORT, running
from bench.bench_peers import count
from bench.bench_serving import Level, calibrate, lengths, measure, unseen
from bench.program import command_line, run_program
from bench.serving_client import Target, first_model
from mlcpipe.bundle import read_manifest
from mlcpipe.cli.terminal import stdout_console
from mlcpipe.errors import ResourceError, UsageError

_NAMES = ("one process", "stages")


@contextmanager
def local_cluster(nodes: int) -> Iterator[None]:
    """Ray nodes on this machine, which programs join that start meanwhile."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    os.environ["RAY_ADDRESS"] = cluster.address
    try:
        for _ in range(nodes - 1):
            cluster.add_node(num_cpus=1)
        yield
    finally:
        cluster.shutdown()


async def _levels(urls: list[str], options: Namespace) -> dict[int, list[list[Level]]]:
    """By the number of clients those of each round, of both servers. Raises ResourceError for a failed request."""
    targets = [Target(url, "completions", await first_model(Target(url))) for url in urls]
    prompts = [await calibrate(target, 0) for target in targets]
    found: dict[int, list[list[Level]]] = {}
    for clients in options.clients:
        for round_ in range(options.rounds):
            levels = []
            for name, target, make in zip(_NAMES, targets, prompts):
                level = await measure(target, options, unseen(make, f"{clients} {round_}"), "clients", clients)
                if level.failed or level.first is None:
                    raise ResourceError("requests failed", where=name, found=level.failed)
                print(f"{clients} clients, {name}: {level.tokens_per_s:.2f} tokens/s", file=sys.stderr)
                levels.append(level)
            found.setdefault(clients, []).append(levels)
    return found


def main() -> None:
    """Start the nodes and the servers, measure, print a table of medians."""
    parser = command_line(__doc__)
    add = parser.add_argument
    add("whole", type=Path)
    add("cut", type=Path)
    add("--clients", type=lambda text: [count(one) for one in text.split(",")], default=[1, 3])
    add("--load", default="128/32")
    add("--requests", type=count, default=6)
    add("--rounds", type=count, default=3)
    add("--threads", type=count, default=1)
    add("--context", type=count, default=1024)
    options = parser.parse_args()
    prompt, _, answer = options.load.partition("/")
    options.prompt_tokens, options.answer_tokens, options.long_prompt = lengths(prompt), lengths(answer or "32"), 0
    stages = len(read_manifest(options.cut).stages)
    if stages < 2:
        raise UsageError("CUT", where=options.cut, expected="a bundle in stages", found="one for one device")
    several = ["--context", str(options.context), "--threads", str(options.threads)]
    several += ["--sequences", str(max(options.clients)), "--port", PORT]
    serve = [sys.executable, "-m", "mlcpipe", "serve"]
    commands = [
        [*serve, str(options.whole), *several],
        [*serve, str(options.cut), "--ray", "1", "--stages", str(stages), *several],
    ]
    with ExitStack() as servers:
        servers.enter_context(local_cluster(stages))
        urls = [servers.enter_context(running(name, command)) for name, command in zip(_NAMES, commands)]
        found = asyncio.run(_levels(urls, options))
    table = Table("clients", *(f"{name}: first token, s" for name in _NAMES), *(f"{name}: tokens/s" for name in _NAMES))
    table.add_column("ratio of each round")
    for clients, rounds in found.items():
        firsts = [statistics.median(level.first[0] for level in levels if level.first) for levels in zip(*rounds)]
        rates = [statistics.median(level.tokens_per_s for level in levels) for levels in zip(*rounds)]
        ratios = " ".join(f"{two.tokens_per_s / one.tokens_per_s:.2f}" for one, two in rounds)
        table.add_row(str(clients), *(f"{s:.3f}" for s in firsts), *(f"{rate:.2f}" for rate in rates), ratios)
    stdout_console().print(table)


if __name__ == "__main__":
    run_program(main)
