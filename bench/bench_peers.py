"""Measures mlcpipe, llama.cpp and OpenVINO GenAI side by side on this CPU, with the same number of threads.

    python -m bench.bench_peers [--models llama-1b] [--rows decode-0,prefill-512,load] [--output result.json]

    python -m bench.bench_peers --vulkan 0 --models llama-25m --runtimes llama.cpp --rows prefill-128,decode-0

    python -m bench.bench_peers --goals hybrids --timeout 7200

Every group of rows runs in interleaved processes (A B C A B C ...), each on a quiet machine. Read bandwidth is
measured by `mlcpipe bench` in the same rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.build_llama_cpp import source_of
from bench.goals import GOALS, goals_document
from bench.prepare import RUNTIMES, Places, Subject, default_work, prepare, subject
from bench.program import command_line, run_program
from bench.quiet import Measured, run_measured, wait_until_quiet
from bench.report import Run, Traffic, compare, document, markdown, merge
from bench.runners import OURS, Cell, Effort, LlamaBench, Output, Runner
from mlcpipe.bundle import Manifest
from mlcpipe.errors import UsageError
from mlcpipe.host.bandwidth import last_cache_bytes
from mlcpipe.host.cpu import core_counts
from mlcpipe.host.versions import system_name

_ATTEMPTS = 2
_MODELS = ("llama-1b", "qwen2-0.5b")
_QUANTIZATIONS = ("q4f16_1", "q8f16_1")
_MARGIN = 0.9  # a variant this much slower than its sibling everywhere in the first round is not measured again
_KINDS = ("prefill", "decode", "batch", "load", "memory")
_ROWS = {
    4: "prefill-16,prefill-512,prefill-2048,decode-0,decode-1024,decode-4096,load,memory-2048",
    8: "prefill-512,decode-0",
    0: "prefill-512,decode-0",
}


@dataclass(frozen=True)
class Patience:
    """How quiet the machine must be (cores that others use) and how long to wait for that, seconds."""

    limit_cores: float
    wait_s: float
    timeout_s: float


@dataclass
class Log:
    """What the processes said, gathered while they ran: each one's last report, and all bandwidths in GB/s."""

    said: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    read_gb_s: list[float] = field(default_factory=list)


def measure_group(
    cells: Sequence[Cell], runners: Sequence[Runner], rounds: int, patience: Patience, log: Log
) -> dict[Cell, dict[str, list[Run]]]:
    """Run all runtimes `rounds` times, interleaved, ours first -> the runs by cell and runtime name."""
    runs: dict[Cell, dict[str, list[Run]]] = {cell: {runner.name: [] for runner in runners} for cell in cells}
    active = list(runners)
    for number in range(rounds):
        for runner in active:
            measured, output, at = _quietest(cells, runner, patience)
            log.said[runner.name] = output.said
            log.read_gb_s.extend(output.read_gb_s)
            for cell in cells:
                run = Run(
                    number, output.readings[cell], measured.wall_s, measured.foreign_cores,
                    measured.steal_cores, at, output.read_gb_s, output.shares.get(cell),
                )  # fmt: skip
                runs[cell][runner.name].append(run)
        if number == 0:
            active = [runner for runner in runners if not _beaten(runner, runners, runs)]
    return runs


def _beaten(runner: Runner, runners: Sequence[Runner], runs: Mapping[Cell, Mapping[str, Sequence[Run]]]) -> bool:
    """Another variant of the same peer was faster in every cell, by a margin."""

    def speed(cell: Cell, name: str) -> float:
        median = runs[cell][name][0].reading.median
        return median if cell.more_is_better else 1 / median

    return any(
        all(speed(cell, runner.name) < _MARGIN * speed(cell, other.name) for cell in runs)
        for other in runners
        if other.peer == runner.peer and other.name != runner.name
    )


def _quietest(cells: Sequence[Cell], runner: Runner, patience: Patience) -> tuple[Measured, Output, str]:
    """One process; another if others used the CPU meanwhile, and the less disturbed counts."""
    tries: list[tuple[Measured, Output, str]] = []
    for _ in range(_ATTEMPTS):
        came = wait_until_quiet(patience.limit_cores, patience.wait_s)
        at = time.strftime("%H:%M:%S")
        measured = run_measured(runner.command(cells), timeout_s=patience.timeout_s)
        output = runner.parse(measured.stdout, cells)
        measured = measured.counting(output.cpu_s)
        tries.append((measured, output, at))
        figures = ", ".join(f"{c.kind} {c.tokens}: {output.readings[c].median:.4g}" for c in cells)
        print(
            f"{at} {runner.name}: {figures}; {measured.wall_s:.0f} s, foreign {measured.foreign_cores:.2f} cores"
            + (f", read {statistics.median(output.read_gb_s):.1f} GB/s" if output.read_gb_s else "")
            + "".join(f", share {share:.2f}" for share in output.shares.values()),
            file=sys.stderr,
        )
        # a machine that did not get quiet will not do so in the next attempt either
        if measured.foreign_cores <= patience.limit_cores or not came:
            break
    return min(tries, key=lambda one: one[0].foreign_cores)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run everything -> the document; `--output` has what is known after each group, should a later one fail."""
    effort = Effort(options.threads or core_counts()[0], options.repeats, options.decode_tokens)
    log, content = Log(), earlier(options.output)
    if options.goals is not None:
        content["goals"] = goals_document(options.goals)
    asked = options.rows or [row for rows in content.get("goals", {}).values() for row in rows]
    batches = any(row.startswith("batch") for row in asked)
    places = Places(options.work or default_work(), options.checkpoint, options.llama_bench, options.vulkan, batches)
    subjects = [subject(model, scheme) for model in options.models for scheme in options.quantizations]
    prepared = [(what, *prepare(what, places, effort, options.runtimes)) for what in subjects]
    for what, runners, manifest in prepared:
        content = measure_subject(what, runners, manifest, options, log, content)
    return content


def measure_subject(
    what: Subject,
    runners: Sequence[Runner],
    manifest: Manifest,
    options: argparse.Namespace,
    log: Log,
    content: dict[str, Any],
) -> dict[str, Any]:
    """Every group of rows of one model and one kind of weights -> `content` and what is new."""
    patience = Patience(options.foreign, options.wait, options.timeout)
    asked = content.get("goals", {}).get(what.model) or _ROWS[what.bits].split(",")
    cells = [cell_of(row) for row in options.rows or asked]
    kv = manifest.kv_bytes_per_token
    traffic = Traffic(
        {runner.name: runner.bytes_per_token for runner in runners},
        {runner.name: kv * runner.kv_factor for runner in runners},
        options.decode_tokens,
        last_cache_bytes(),
    )
    for kind in _KINDS:
        group = [cell for cell in cells if cell.kind == kind]
        for part in [[cell] for cell in group] if kind == "memory" else [group] if group else []:
            runs = measure_group(part, runners, options.rounds, patience, log)
            peers = {runner.name: runner.peer for runner in runners}
            key = what.model, what.quantization, what.bits
            new = [compare(key, cell, runs[cell], peers, traffic, options.foreign) for cell in part]
            content = merge(content, document(new, circumstances(runners, options, log)))
            keep(content, options.output)
    return content


def earlier(path: Path | None) -> dict[str, Any]:
    """What the file has already."""
    if path is None or not path.is_file():
        return document([], {})
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def keep(content: Mapping[str, Any], path: Path | None) -> None:
    """Write what is known so far, where a file for it was named."""
    if path is not None:
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def circumstances(runners: Sequence[Runner], options: argparse.Namespace, log: Log) -> dict[str, str]:
    """The circumstances, for judging the numbers."""
    ours = log.said[OURS]
    facts = {
        "cpu": f"{ours['cpu']}, {ours['threads']} threads; {system_name()}",
        "date": time.strftime("%Y-%m-%d"),
        OURS: ", ".join(f"{name} {number or 'absent'}" for name, number in ours["versions"].items()),
    }
    if not ours.get("on_host", True):
        facts["device"] = ours["device"]
    for runner in runners:
        said = log.said[runner.name]
        if isinstance(runner, LlamaBench):
            build = f"build {said.get('build_number')} ({said.get('build_commit')})"
            facts[runner.peer] = f"{source_of(runner.binary) or 'source unknown'}; {build}"
        elif runner.peer != OURS:
            facts[runner.peer] = str(said.get("version"))
    facts["read bandwidth"] = (
        f"{statistics.median(log.read_gb_s):.1f} GB/s ({min(log.read_gb_s):.1f} - {max(log.read_gb_s):.1f} in the rounds)"
    )
    facts["runs"] = f"{options.rounds} rounds of {options.repeats} repeats; decode of {options.decode_tokens} tokens"
    return facts


def cell_of(row: str) -> Cell:
    """ "decode-1024" -> Cell("decode", 1024), "load" -> Cell("load", 1). Raises UsageError."""
    kind, _, tokens = row.partition("-")
    if kind == "load" and not tokens:
        return Cell("load", 1)
    if kind not in ("prefill", "decode", "batch", "memory") or not tokens.isascii() or not tokens.isdigit():
        raise UsageError("--rows", expected="prefill-N, decode-N, batch-N, memory-N or load", found=row)
    return Cell(kind, int(tokens))


def options_of(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options that `bench_peers` and `busy_core` share."""
    add = parser.add_argument
    names = ", ".join(_MODELS)
    add("--models", type=words, default=_MODELS, help=f"shapes with random weights (default: {names})")
    add(
        "--quantizations",
        type=words,
        default=_QUANTIZATIONS,
        help="ours, which peers' follow by bits, or types of GGUF files",
    )
    add(
        "--runtimes",
        type=words,
        default=RUNTIMES,
        help="to compare with mlcpipe: native, llama.cpp, openvino (default: all)",
    )
    add("--checkpoint", type=Path, help="llama or qwen2, instead of the shape that --models names")
    add("--llama-bench", type=Path, help="llama.cpp's benchmark (default: built from source)")
    add_effort(parser)
    options = parser.parse_args(arguments)
    check_runtimes(options.runtimes, RUNTIMES)
    return options


def with_goals(options: argparse.Namespace) -> argparse.Namespace:
    """The options, with what `--goals` stands for in place of those that were not given."""
    if options.goals is not None:
        options.models = tuple(GOALS[options.goals]) if options.models is _MODELS else options.models
        options.quantizations = ("q4f16_1",) if options.quantizations is _QUANTIZATIONS else options.quantizations
        options.runtimes = ("llama.cpp",) if options.runtimes is RUNTIMES else options.runtimes
    return options


def add_effort(parser: argparse.ArgumentParser, *, decode_tokens: int = 32) -> None:
    """The options of every comparison: where, how much, how quiet."""
    add = parser.add_argument
    add("--work", type=Path, help="where to keep what is made (default: in mlcpipe's cache)")
    add("--decode-tokens", type=count, default=decode_tokens)
    add("--threads", type=count, help="for all (default: the physical cores)")
    add("--rounds", type=count, default=2, help="rounds of interleaved runs (default: %(default)s)")
    add("--repeats", type=count, default=3, help="measurements in each process (default: %(default)s)")
    add("--foreign", type=float, default=0.1, help="cores others may use on a quiet machine (default: %(default)s)")
    add("--wait", type=float, default=60.0, help="seconds to wait for quiet (default: %(default)s)")
    add("--timeout", type=float, default=600.0, help="seconds a process may take (default: %(default)s)")
    add("--json", action="store_true", help="print JSON with every run instead of Markdown")


def check_runtimes(asked: Sequence[str], known: Sequence[str]) -> None:
    """Raises UsageError for a name that is not known."""
    unknown = set(asked) - set(known)
    if unknown:
        raise UsageError("--runtimes", expected=", ".join(known), found=", ".join(sorted(unknown)))


def words(text: str) -> tuple[str, ...]:
    """ "a,b" -> ("a", "b")."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def count(text: str) -> int:
    """An option that is at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def main() -> None:
    """Prepare, measure, report."""
    parser = command_line(__doc__)
    parser.add_argument("--vulkan", type=int, metavar="N", help="on the Vulkan device N, not on the CPU")
    parser.add_argument("--rows", type=words, help=f"default: {_ROWS[4]}; for 8 bits {_ROWS[8]}")
    parser.add_argument(
        "--goals",
        choices=GOALS,
        help="the models and rows that have goals, in 4 bits beside llama.cpp, and which are reached",
    )
    parser.add_argument("--output", type=Path, help="keep the JSON in this file, after each group; adds to what it has")
    options = with_goals(options_of(parser, None))
    content = measure(options)
    sys.stdout.write(json.dumps(content, indent=1) + "\n" if options.json else markdown(content))


if __name__ == "__main__":
    run_program(main)
