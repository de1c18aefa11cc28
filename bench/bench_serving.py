"""Measures a server with OpenAI's API under load: ours, vLLM's, llama-server.

python -m bench.bench_serving --concurrency 1,4,8              # starts mlcpipe serve with the demo model
python -m bench.bench_serving --model hf://Qwen/Qwen3-0.6B --rate 0.5,1,2 --plot load.svg
python -m bench.bench_serving --url http://127.0.0.1:8080 --concurrency 8 --prompt-tokens 64-512 --long-prompt 2048
python -m bench.bench_serving --url OURS --url PEERS --concurrency 8,8,8 --schema answer.json   # in turn, load by load
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.bench_peers import count
from bench.program import run_program
from bench.serving_client import Answer, Target, ask, first_model, send
from bench.serving_plot import plot
from mlcpipe.errors import ResourceError

_WORDS = ["able", "back", "call", "dark", "each", "fact", "game", "half", "idea", "just", "kind", "last", "make"]
Prompts = Callable[[int, random.Random], str]
_TRIED = (16, 80)  # words of the prompts that tell how many tokens a word has


def lengths(text: str) -> Callable[[random.Random], int]:
    """How numbers of tokens are drawn: "128", "64-512" evenly, "~128" exponentially around it. Raises ValueError."""
    mean = float(text[1:]) if text.startswith("~") else 0.0
    low, _, high = ("1", "", "1") if mean > 0 else text.partition("-")
    first, last = int(low), int(high or low)
    if not 1 <= first <= last:
        raise ValueError(text)
    return lambda source: max(1, round(source.expovariate(1 / mean))) if mean else source.randint(first, last)


@dataclass(frozen=True)
class Level:
    """The results of one load. Times in seconds as percentiles 50, 90 and 99; None if nothing was measured.

    server     its address
    load       "8 clients", or "2 requests/s"
    client_s   processor time of this program
    failed     requests by what went wrong
    first      to the first token, `whole` to the end
    between    pieces of an answer; `beside` those that end while the long prompt is computed
    per_token  an answer's time after its first piece over its other tokens
    """

    server: str
    load: str
    client_s: float
    requests: int
    failed: dict[str, int]
    requests_per_s: float
    tokens_per_s: float
    prompt_tokens: int
    answer_tokens: int
    first: list[float] | None
    between: list[float] | None
    per_token: list[float] | None
    whole: list[float] | None
    beside: list[float] | None


def level_of(
    server: str, load: str, answers: Sequence[Answer], seconds: float, client_s: float, long: Answer | None
) -> Level:
    """The summary of all answers of one load."""
    good = [answer for answer in answers if not answer.error]
    tokens = sum(answer.tokens for answer in good)
    gaps = [pair for answer in good for pair in zip(answer.pieces, answer.pieces[1:])]
    beside = [(a, b) for a, b in gaps if long is not None and not long.error and long.sent < b and a < long.pieces[0]]
    return Level(
        server, load, client_s, len(answers), dict(Counter(answer.error for answer in answers if answer.error)),
        len(good) / seconds, tokens / seconds, sum(answer.prompt for answer in good), tokens,
        _percentiles([answer.pieces[0] - answer.sent for answer in good]),
        _percentiles([b - a for a, b in gaps]),
        _percentiles([(one.pieces[-1] - one.pieces[0]) / (one.tokens - 1) for one in good if one.tokens > 1]),
        _percentiles([answer.ended - answer.sent for answer in good]),
        _percentiles([b - a for a, b in beside]),
    )  # fmt: skip


def _percentiles(values: Sequence[float]) -> list[float] | None:
    return [float(value) for value in np.percentile(values, (50, 90, 99))] if values else None


async def calibrate(target: Target, shared: int) -> Prompts:
    """Makes prompts of about so many random words that the server counts so many tokens; `shared` begin all of them.

    Raises ResourceError where the server does not answer, or does not count.
    """
    counts = []
    for words in _TRIED:
        answer = await ask(target, " ".join(_WORDS[i % len(_WORDS)] for i in range(words)), 2)
        if answer.error or not answer.prompt:
            raise ResourceError("no answer with its usage", where=target.url, found=answer.error or "no prompt_tokens")
        counts.append(answer.prompt)
    per_word = (counts[1] - counts[0]) / (_TRIED[1] - _TRIED[0])
    base, same = counts[0] - per_word * _TRIED[0], random.Random(0).choices(_WORDS, k=round(shared / per_word))

    def prompt(tokens: int, source: random.Random) -> str:
        words = max(1, round((tokens - base) / per_word) - len(same))
        return " ".join(same + source.choices(_WORDS, k=words))

    return prompt


def unseen(make: Prompts, first: str) -> Prompts:
    """Prompts that no server has seen: they begin otherwise."""
    return lambda tokens, source: f"{first} {make(tokens, source)}"


async def measure(
    target: Target, options: argparse.Namespace, prompts: Prompts, kind: str, number: float, schema: Any = None
) -> Level:
    """Send `options.requests` requests: from `number` clients, or `number` a second on average (kind "requests/s").

    The long prompt is sent once a piece of the answer in the middle has come. With `schema` answers are JSON.
    """
    source = random.Random(f"{kind} {number}")
    sizes = [(options.prompt_tokens(source), options.answer_tokens(source)) for _ in range(options.requests)]
    work = [(prompts(tokens, source), answer) for tokens, answer in sizes]
    places = asyncio.Semaphore(int(number) if kind == "clients" else len(work))
    long_prompt = prompts(options.long_prompt, source) if options.long_prompt else ""
    long: list[asyncio.Future[Callable[[], Answer]]] = []

    async def one(index: int) -> Callable[[], Answer]:
        prompt, tokens = work[index]

        def came(pieces: int) -> None:
            if not long and pieces > 1:  # the first may be the head alone
                long.append(asyncio.ensure_future(send(target, long_prompt, 2)))

        async with places:
            amid = long_prompt and index == len(work) // 2
            return await send(target, prompt, tokens, schema=schema, came=came if amid else None)

    arrival = start = time.perf_counter()
    began_s = time.process_time()
    tasks: list[asyncio.Future[Callable[[], Answer]]] = []
    for index in range(len(work)):
        tasks.append(asyncio.ensure_future(one(index)))
        if kind != "clients":
            arrival += source.expovariate(number)
            await asyncio.sleep(max(0.0, arrival - time.perf_counter()))
    reads = await asyncio.gather(*tasks)
    client_s = time.process_time() - began_s
    answers = [read() for read in reads]
    seconds = max(answer.ended for answer in answers) - start
    after = (await long[0])() if long else None
    load = f"{number:g} {kind}" + (", schema" if schema else "")
    return level_of(urlsplit(target.url).netloc, load, answers, seconds, client_s, after)


async def measure_all(targets: Sequence[Target], options: argparse.Namespace) -> list[Level]:
    """All loads, one after the other, each of all servers in turn."""
    ready = [await _ready(target, options) for target in targets]
    loads = [("clients", number) for number in options.concurrency] + [("requests/s", rate) for rate in options.rate]
    levels = []
    for kind, number in loads:
        for schema in (None, options.schema) if options.schema else (None,):
            for target, prompts in ready:
                levels.append(found := await measure(target, options, prompts, kind, number, schema))
                client_us = 1e6 * found.client_s / max(1, found.answer_tokens)
                print(f"{found.server}, {found.load}: {found.tokens_per_s:.1f} tokens/s, {sum(found.failed.values())} failed, "
                      f"{client_us:.0f} µs a token of this program", *found.failed, file=sys.stderr)  # fmt: skip
    return levels


async def _ready(target: Target, options: argparse.Namespace) -> tuple[Target, Prompts]:
    try:
        target = replace(target, model=target.model or await first_model(target))
    except (OSError, ValueError, LookupError, EOFError) as error:
        raise ResourceError("the server lists no model", where=target.url, found=str(error)) from None
    return target, await calibrate(target, options.shared_prefix_tokens)


@contextmanager
def own_server(arguments: Sequence[str]) -> Iterator[str]:
    """The address of `mlcpipe serve ARGUMENTS…`. Raises ResourceError with its last line if it does not start."""
    command = [sys.executable, "-m", "mlcpipe", "serve", *arguments, "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            line = ""
            while not (found := re.search(r"http://\S+:\d+(?=  \()", line)):
                line, before = process.stderr.readline(), line  # type: ignore[union-attr]
                if not line:
                    raise ResourceError("mlcpipe serve did not start", found=before.strip())
            yield found[0]
        finally:
            process.kill()


def table_of(levels: Sequence[Level]) -> Table:
    """Three lines for each load: percentiles 50, 90 and 99 of times in milliseconds."""
    beside = any(level.beside for level in levels)
    several = len({level.server for level in levels}) > 1
    heads = ("load", "failed", "requests/s", "tokens/s", "ms", "first token", "between", "per token", "answer")
    table = Table(*(("server",) if several else ()), *heads, *(("beside the long prompt",) if beside else ()))
    for level in levels:
        failed = str(sum(level.failed.values()))
        server = (level.server,) if several else ()
        figures = *server, level.load, failed, f"{level.requests_per_s:.2f}", f"{level.tokens_per_s:.1f}"
        times = [level.first, level.between, level.per_token, level.whole, *([level.beside] if beside else [])]
        for index, percentile in enumerate(("p50", "p90", "p99")):
            milliseconds = [f"{1e3 * one[index]:.{0 if one[index] >= 0.1 else 1}f}" if one else "–" for one in times]
            table.add_row(
                *(("",) * len(figures) if index else figures), percentile, *milliseconds, end_section=index == 2
            )
    return table


def _numbers(text: str) -> tuple[float, ...]:
    numbers = tuple(float(part) for part in text.split(","))
    if min(numbers) <= 0:
        raise ValueError(text)
    return numbers


def _schema(path: str) -> dict[str, Any]:
    schema: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    return schema


def main(arguments: Sequence[str] | None = None) -> int:
    """Start a server or find one, measure, report. 1 if a request failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--url", action="append", help="a server that runs, with or without /v1; several take turns (default: start mlcpipe serve)")  # fmt: skip
    add("--model", help="with --url its name there (default: the first it lists), else what mlcpipe serve takes")
    add("--serve", type=str.split, default=[], help="options for mlcpipe serve, in one string")
    add("--api", choices=("chat", "completions"), default="chat", help="completions for models without a template")
    add("--api-key")
    add("--concurrency", type=_numbers, default=(), help="clients who wait for their answers, as 1,4,8")
    add("--rate", type=_numbers, default=(), help="requests per second, arriving at random (Poisson), as 0.5,1,2")
    add("--requests", type=count, default=32, help="for each load (default: %(default)s)")
    add("--prompt-tokens", default="128", help="N, A-B evenly, ~MEAN exponentially (default: 128)", type=lengths)
    add("--answer-tokens", default="64", help="likewise (default: 64)", type=lengths)
    add("--shared-prefix-tokens", type=count, default=0, help="of each prompt are the same")
    add("--long-prompt", type=count, default=0, metavar="N", help="a prompt of N tokens comes amid each load")
    add("--schema", type=_schema, metavar="FILE", help="each load a second time, with answers of this JSON schema")
    add("--json", action="store_true", help="print JSON, in seconds")
    add("--plot", type=Path, help="write an SVG of throughput against latency")
    options = parser.parse_args(arguments)
    if not options.concurrency and not options.rate:
        options.concurrency = (1, 2, 4, 8)
    given = [*([options.model] if options.model else []), *options.serve]
    with nullcontext() if options.url else own_server(given) as url:
        model = options.model if options.url else None
        targets = [Target(one, options.api, model, options.api_key) for one in options.url or [url]]
        levels = asyncio.run(measure_all(targets, options))
    if options.plot:
        named = [(f"{one.server}, {one.load}", one) for one in levels]
        first = [(name, one.tokens_per_s, one.first) for name, one in named if one.first]
        between = [(name, one.tokens_per_s, one.between) for name, one in named if one.between]
        options.plot.write_text(plot({"first token": first, "between tokens": between}), encoding="utf-8")
    if options.json:
        print(json.dumps([asdict(level) for level in levels], indent=1))
    else:
        Console().print(table_of(levels))
    return 1 if any(level.failed for level in levels) else 0


if __name__ == "__main__":
    run_program(main)
