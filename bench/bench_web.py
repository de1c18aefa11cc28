"""Compares mlcpipe's library in a browser with transformers.js on WebGPU and llama.cpp in wasm, on one adapter.

    python -m bench.bench_web [--adapter default] [--output result.json]

Runs are interleaved (A B C A B C ...), each in its own Chromium, on a quiet machine. See README.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.bench_peers import (
    Log,
    Patience,
    add_effort,
    check_runtimes,
    earlier,
    keep,
    measure_group,
    words,
)
from bench.prepare import default_work
from bench.prepare_web import MODEL, QUANTIZATION, find_browser, prepare_web
from bench.program import command_line, run_program
from bench.report import Traffic, compare, document, markdown, merge
from bench.runners import OURS, Cell
from bench.web_runners import PLAIN, TRANSFORMERS, WLLAMA, Browser, WebEffort, WebRunner, runners_of
from mlcpipe.errors import UsageError
from mlcpipe.host.cpu import core_counts, cpu_model
from mlcpipe.host.versions import system_name
from mlcpipe.version import __version__

_PARTS = {
    "speed": (Cell("prefill", 128), Cell("decode", 128)),  # of the same generations
    "load": (Cell("load", 16),),
}
_BITS = 4
_RUNTIMES = (PLAIN, TRANSFORMERS, WLLAMA)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Prepare, run everything -> the document; `--output` has what is known after each part."""
    threads = options.threads or core_counts()[0]
    effort = WebEffort(threads, options.repeats, options.decode_tokens, options.timeout / 2)
    browser = Browser(find_browser(options.browser), options.adapter, options.headed)
    runners = runners_of(prepare_web(options.work or default_work(), options.target), browser, effort)
    wanted = [runner for runner in runners if runner.peer in (OURS, *options.runtimes)]
    return measure_parts(wanted, options, earlier(options.output))


def measure_parts(runners: Sequence[WebRunner], options: argparse.Namespace, content: dict[str, Any]) -> dict[str, Any]:
    """Each part of `--parts` -> `content` and what is new."""
    patience, log = Patience(options.foreign, options.wait, options.timeout), Log()
    nothing = dict.fromkeys((runner.name for runner in runners), 0)
    traffic = Traffic(nothing, nothing, options.decode_tokens, 0)  # a browser measures no bandwidth
    for part in options.parts:
        # of the plain runtime only the speed is compared: it has no cache for files
        some = [runner for runner in runners if part == "speed" or runner.name != PLAIN]
        runs = measure_group(_PARTS[part], some, options.rounds, patience, log)
        peers = {runner.name: runner.peer for runner in some}
        key = MODEL, QUANTIZATION, _BITS
        new = [compare(key, cell, runs[cell], peers, traffic, options.foreign) for cell in _PARTS[part]]
        content = merge(content, document(new, circumstances(runners, options, log)))
        keep(content, options.output)
    return content


def circumstances(runners: Sequence[WebRunner], options: argparse.Namespace, log: Log) -> dict[str, str]:
    """The circumstances, for judging the numbers."""
    ours = log.said[OURS]
    window = "with a window" if options.headed else "headless"
    facts = {
        "browser": f"Chromium {ours['browser']}, {window}",
        "adapter": adapter_name(ours["adapter"]),
        "cpu": f"{cpu_model()}, {core_counts()[1]} processors; {system_name()}",
        "date": time.strftime("%Y-%m-%d"),
    }
    for runner in runners:
        if runner.name in log.said:
            packages = ", ".join(f"{name} {version}" for name, version in log.said[runner.name]["versions"].items())
            facts[runner.peer] = packages
    facts[OURS] = f"{__version__}, {options.target}, in {facts[OURS]}"
    if WLLAMA in facts:
        facts[WLLAMA] += f", {runners[0].effort.threads} threads of the CPU"
    facts["runs"] = (
        f"{options.rounds} rounds of at most {options.repeats} repeats; decode of {options.decode_tokens} tokens"
    )
    return {**facts, **own_time(log)}


def adapter_name(adapter: Mapping[str, Any]) -> str:
    """ "google/swiftshader, without shader-f16"."""
    named = "/".join(part for part in (adapter["vendor"], adapter["architecture"]) if part) or "unnamed"
    described = f" ({adapter['description']})" if adapter["description"] else ""
    return f"{named}{described}, {'with' if adapter['f16'] else 'without'} shader-f16"


def own_time(log: Log) -> dict[str, str]:
    """A page's own time per token, without waiting for the GPU: with WebLLM, and with TVM's runtime alone."""
    samples = {name: log.said[name]["samples"] for name in (OURS, PLAIN) if name in log.said}
    if not all("own_ms" in some for some in samples.values()) or PLAIN not in samples:
        return {}
    ours, plain = (statistics.median(some["own_ms"]) for some in samples.values())
    whole = statistics.median(1000 / speed for speed in samples[OURS]["decode"])
    return {"outside waits for the GPU": f"{ours:.1f} of {whole:.1f} ms a token; {PLAIN} {plain:.1f} ms"}


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line. Raises UsageError."""
    parser = command_line(__doc__)
    add = parser.add_argument
    add(
        "--adapter",
        choices=("swiftshader", "default"),
        default="swiftshader",
        help="default: the browser's choice, a GPU",
    )
    add("--headed", action="store_true", help="open a window, as some drivers want")
    add("--browser", help="Chromium or Chrome (default: the first that is installed)")
    add("--target", default="webgpu", help="of our bundle: webgpu, or webgpu-f16 for adapters with shader-f16")
    add("--runtimes", type=words, default=_RUNTIMES, help=f"to compare with mlcpipe (default: {', '.join(_RUNTIMES)})")
    add("--parts", type=words, default=tuple(_PARTS), help=f"default: {', '.join(_PARTS)}")
    add("--output", type=Path, help="keep the JSON in this file, after each part; adds to what it has")
    add_effort(parser, decode_tokens=16)
    options = parser.parse_args(arguments)
    check_runtimes(options.runtimes, _RUNTIMES)
    if not set(options.parts) <= set(_PARTS):
        raise UsageError("--parts", expected=", ".join(_PARTS), found=", ".join(options.parts))
    return options


def main() -> None:
    """Prepare, measure, report."""
    options = options_of(None)
    content = measure(options)
    sys.stdout.write(json.dumps(content, indent=1) + "\n" if options.json else markdown(content))


if __name__ == "__main__":
    run_program(main)
