"""Measures the native program's server beside `mlcpipe serve` and llama-server, with several clients at once.

    python -m bench.bench_native_serving [--model qwen2-0.5b] [--concurrency 1,4,8] [--llama-server FILE]

All have the same shape with random weights of 4 bits and answer the same load in turn. Without --llama-server llama.cpp
is built, which takes twenty minutes. Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from rich.table import Table

from bench.bench_peers import count
from bench.bench_serving import Level, lengths, measure_all, table_of
from bench.build_llama_cpp import VERSION, build_llama_cpp, build_name
from bench.make_checkpoint import SHAPES, make_checkpoint
from bench.prepare import default_work
from bench.program import command_line, run_program
from bench.serving_client import Target
from mlcpipe.cli.terminal import stdout_console
from mlcpipe.compiler.link import find_cxx
from mlcpipe.compiler.native_runtime import write_program
from mlcpipe.devices.support.threads import physical_cores
from mlcpipe.errors import ResourceError, UsageError
from mlcpipe.loading import prepare_bundle
from mlcpipe.support.env import env

_SEQUENCES = 8
_STARTS_S = 120
PORT = "{port}"
Commands = dict[str, list[str]]  # how each server is started, by name


def commands(work: Path, options: argparse.Namespace) -> Commands:
    """Makes the servers' inputs. Raises what the steps raise."""
    from bench.make_gguf import make_gguf

    checkpoint, program = work / f"{options.model}-text", work / "native-program"
    gguf = work / f"{options.model}-text-q4_0.gguf"
    if not checkpoint.is_dir():
        if options.model not in SHAPES:
            raise UsageError("--model", expected=", ".join(SHAPES), found=options.model)
        make_checkpoint(options.model, checkpoint, tokenizer=True)
    if not gguf.is_file():
        make_gguf(checkpoint, gguf, bits=4)
    bundle = str(prepare_bundle(checkpoint, quantization="q4f16_1", target="cpu"))
    write_program(find_cxx(), env().cache_dir, None, program)
    server = options.llama_server or work / build_name(VERSION, False) / "bin" / "llama-server"
    if options.llama_server is None and not server.is_file():
        build_llama_cpp(work, server=True)
    context, threads, several = (str(n) for n in (options.context, physical_cores(), _SEQUENCES))
    ours = ["--port", PORT, "--sequences", several, "--context", context, "--threads", threads]
    total = str(options.context * _SEQUENCES)
    return {
        "chat serve": [str(program), "serve", "-m", bundle, *ours],
        "mlcpipe serve": [sys.executable, "-m", "mlcpipe", "serve", bundle, *ours],
        "llama-server": [str(server), "-m", str(gguf), "--port", PORT, "-np", several, "-c", total, "-t", threads],
    }


@contextmanager
def running(name: str, command: Sequence[str]) -> Iterator[str]:
    """The address of a server on a free port, once it is ready. Raises ResourceError with its last line if it ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words, url = [str(port) if word == PORT else word for word in command], f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log, subprocess.Popen(words, stdout=log, stderr=log) as process:
        try:
            until = time.monotonic() + _STARTS_S
            while not _is_ready(url):
                if process.poll() is not None or time.monotonic() > until:
                    log.seek(0)
                    lines = log.read().decode(errors="replace").strip().splitlines()
                    raise ResourceError(f"{name} does not start", found=lines[-1] if lines else "no output")
                time.sleep(0.1)
            yield url
        finally:
            process.kill()


def _is_ready(url: str) -> bool:
    try:
        with urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (URLError, OSError):
        return False


def ratios(levels: Sequence[Level]) -> Table:
    """Tokens per second of each load, and the first server's ratio to the others."""
    servers = list(dict.fromkeys(level.server for level in levels))
    table = Table("tokens per second", *servers)
    for load in dict.fromkeys(level.load for level in levels):
        rates = {level.server: level.tokens_per_s for level in levels if level.load == load}
        first = rates[servers[0]]
        cells = [
            f"{rates[one]:.1f}" + (f" ({first / rates[one]:.2f}×)" if one != servers[0] else "") for one in servers
        ]
        table.add_row(load, *cells)
    return table


def main() -> int:
    """Start the servers, measure, print two tables. 1 if a request failed."""
    parser = command_line(__doc__)
    add = parser.add_argument
    add("--model", default="qwen2-0.5b", help="a shape with random weights (default: %(default)s)")
    add("--work", type=Path, help="where to keep what is made (default: in mlcpipe's cache)")
    add("--llama-server", type=Path, metavar="FILE", help="llama.cpp's (default: built)")
    add(
        "--concurrency",
        type=lambda text: tuple(map(count, text.split(","))),
        default=(1, 4, 8),
        help="clients, as 1,4,8",
    )
    add("--requests", type=count, default=24, help="for each load (default: %(default)s)")
    add("--prompt-tokens", type=lengths, default="128", help="default: %(default)s")
    add("--answer-tokens", type=lengths, default="64", help="default: %(default)s")
    add("--context", type=count, default=1024, help="tokens of each sequence (default: %(default)s)")
    parser.set_defaults(rate=(), shared_prefix_tokens=0, long_prompt=0, schema=None)
    options = parser.parse_args()
    work = options.work or default_work()
    work.mkdir(parents=True, exist_ok=True)
    with ExitStack() as servers:
        started = {servers.enter_context(running(*one)): one[0] for one in commands(work, options).items()}
        targets = [Target(url, "completions") for url in started]
        levels = asyncio.run(measure_all(targets, options))
    names = {url.removeprefix("http://"): name for url, name in started.items()}
    levels = [replace(level, server=names[level.server]) for level in levels]
    stdout_console().print(table_of(levels))
    stdout_console().print(ratios(levels))
    return 1 if any(level.failed for level in levels) else 0


if __name__ == "__main__":
    run_program(main)
