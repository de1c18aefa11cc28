"""Measures mlcpipe and llama.cpp side by side on this CPU: the same weights in 4.5 bits, the same threads.

    python -m tests.peers.bench_peers [--checkpoint FOLDER] [--llama-bench PATH] [--json]

Every cell runs in processes that take turns (A B C A B C ...), each on a quiet machine. Read bandwidth is
measured by `mlcpipe bench` in the same runs.
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

from mlcpipe.bundle import read_manifest
from mlcpipe.cli import machine
from mlcpipe.cli.bundles import Wanted, prepare_bundle
from mlcpipe.cli.console import stderr_console
from mlcpipe.env import env
from mlcpipe.errors import MlcpipeError, UsageError
from mlcpipe.progress import console_progress
from tests.peers.build_llama_cpp import VERSION, build_llama_cpp, source_of
from tests.peers.make_checkpoint import make_checkpoint
from tests.peers.quiet import run_measured, wait_until_quiet
from tests.peers.report import OURS, Memory, Run, compare, document, markdown
from tests.peers.runners import Cell, Effort, LlamaBench, Mlcpipe, Reading, Runner

QUANTIZATION = "q4f16_1"
_SHAPE = "llama-1b"
_ATTEMPTS = 3


@dataclass(frozen=True)
class Patience:
    """How quiet the machine must be (cores that others use) and how long to wait for that, seconds."""

    limit_cores: float
    wait_s: float
    timeout_s: float


@dataclass
class Log:
    """What the processes said, gathered while they ran: read bandwidth in GB/s, and each one's last report."""

    quiet_gb_s: list[float] = field(default_factory=list)
    busy_gb_s: list[float] = field(default_factory=list)
    said: dict[str, Mapping[str, Any]] = field(default_factory=dict)

    def add(self, runner: Runner, reading: Reading, *, quiet: bool) -> None:
        """Note what `runner` said in one run."""
        self.said[runner.name] = reading.said
        if runner.name == OURS:
            (self.quiet_gb_s if quiet else self.busy_gb_s).extend(reading.said["read_gb_s"])

    def read_gb_s(self) -> float:
        """The median of the quiet runs, or the highest of all where none was quiet: load only lowers it."""
        return statistics.median(self.quiet_gb_s) if self.quiet_gb_s else max(self.busy_gb_s)


def measure_cell(
    cell: Cell, runners: Sequence[Runner], rounds: int, patience: Patience, log: Log
) -> dict[str, list[Run]]:
    """All runtimes take turns, `rounds` times -> the runs by name of the runtime."""
    runs: dict[str, list[Run]] = {runner.name: [] for runner in runners}
    for number in range(rounds):
        for runner in runners:
            runs[runner.name].append(_quietest(cell, runner, number, patience, log))
    return runs


def _quietest(cell: Cell, runner: Runner, number: int, patience: Patience, log: Log) -> Run:
    """One process; up to two more if others used the CPU meanwhile, and the least disturbed counts."""
    runs: list[Run] = []
    for _ in range(_ATTEMPTS):
        came = wait_until_quiet(patience.limit_cores, patience.wait_s)
        at = time.strftime("%H:%M:%S")
        measured = run_measured(runner.command(cell), timeout_s=patience.timeout_s)
        reading = runner.parse(measured.stdout)
        run = Run(
            number, reading.median, reading.low, reading.high,
            measured.wall_s, measured.foreign_cores, measured.steal_cores, at,
        )  # fmt: skip
        runs.append(run)
        quiet = run.foreign_cores <= patience.limit_cores
        log.add(runner, reading, quiet=quiet)
        print(
            f"{at} {cell.kind} {cell.tokens} {runner.name}: {run.median:.1f} tok/s"
            f" ({run.low:.1f} - {run.high:.1f}), {run.wall_s:.0f} s, foreign {run.foreign_cores:.2f} cores"
            + "".join(f", read {gb_s:.1f} GB/s" for gb_s in reading.said.get("read_gb_s", ())),
            file=sys.stderr,
        )
        if quiet or not came:  # a machine that did not get quiet will not be in the next attempt either
            break
    return min(runs, key=lambda run: run.foreign_cores)


def prepare(options: argparse.Namespace) -> list[Runner]:
    """Make what is missing (checkpoint, llama-bench, GGUF, bundle; kept in the work folder) -> the runtimes."""
    work: Path = options.work or env().cache_dir / "peers"
    checkpoint: Path = options.checkpoint or work / _SHAPE
    if options.checkpoint is None and not checkpoint.is_dir():
        _say(f"write a random checkpoint of the shape {_SHAPE}")
        make_checkpoint(_SHAPE, checkpoint)
    binary: Path | None = options.llama_bench
    if binary is None:
        binary = work / f"build-{VERSION}" / "bin" / "llama-bench"
        if not binary.is_file():
            _say("build llama.cpp")
            build_llama_cpp(work)
    if not binary.is_file():
        raise UsageError("--llama-bench", expected="a file", found=binary)
    try:
        from tests.peers.make_gguf import bytes_per_token, make_gguf
    except ImportError as error:
        raise UsageError(f"{error.name} is missing", next_step="python -m pip install gguf") from error
    console = stderr_console()
    bundle = prepare_bundle(Wanted(str(checkpoint), "cpu", QUANTIZATION), console_progress(console))
    manifest = read_manifest(bundle)
    gguf: Path = options.gguf or work / f"{manifest.checkpoint_hash[:16]}-q4_0.gguf"
    if not gguf.is_file():
        _say("write GGUF")
        make_gguf(checkpoint, gguf)
    threads = options.threads or machine.core_counts()[0]
    effort = Effort(threads, options.repeats, options.decode_tokens)
    weights = bytes_per_token(gguf)
    runners: list[Runner] = [Mlcpipe(bundle, effort, manifest.memory_plan.weights_bytes)]
    runners += [LlamaBench(binary.resolve(), gguf, effort, weights, flash) for flash in (False, True)]
    return runners


def measure(runners: Sequence[Runner], options: argparse.Namespace) -> tuple[str, str]:
    """Run every cell -> (Markdown, JSON); `--output` has what is known after each cell, should a later one fail."""
    cells = [Cell("prefill", n) for n in options.prefill] + [Cell("decode", n) for n in options.depths]
    if not cells:
        raise UsageError("nothing to measure", expected="a prompt length or a depth", found="none")
    patience = Patience(options.foreign, options.wait, options.timeout)
    log = Log()
    runs: dict[Cell, dict[str, list[Run]]] = {}
    for cell in cells:
        runs[cell] = measure_cell(cell, runners, options.rounds, patience, log)
        table, content = _report(runners, runs, options, log)
        if options.output is not None:
            options.output.write_text(content, encoding="utf-8")
    return table, content


def _report(
    runners: Sequence[Runner], runs: Mapping[Cell, dict[str, list[Run]]], options: argparse.Namespace, log: Log
) -> tuple[str, str]:
    """Compare after the runs: all cells share one figure for the read bandwidth."""
    ours = log.said[OURS]
    memory = Memory(log.read_gb_s(), ours["last_cache_bytes"], ours["kv_bytes_per_token"], options.decode_tokens)
    weights = {runner.name: runner.bytes_per_token for runner in runners}
    comparisons = [compare(cell, runs[cell], weights, memory, options.foreign) for cell in runs]
    header = circumstances(runners, options, memory, log)
    return markdown(comparisons, header), json.dumps(document(comparisons, header, memory), indent=1) + "\n"


def circumstances(runners: Sequence[Runner], options: argparse.Namespace, memory: Memory, log: Log) -> dict[str, str]:
    """What a reader must know to judge the numbers."""
    ours, theirs = log.said[OURS], next(log.said[runner.name] for runner in runners if runner.name != OURS)
    llama = next(runner for runner in runners if isinstance(runner, LlamaBench))
    readings = sorted(log.quiet_gb_s or log.busy_gb_s)
    return {
        "cpu": f"{ours['cpu']}, {ours['threads']} threads; {machine.system_name()}",
        "date": time.strftime("%Y-%m-%d"),
        "versions": ", ".join(f"{name} {number or 'absent'}" for name, number in ours["versions"].items()),
        "llama.cpp": f"{source_of(llama.binary) or 'source unknown'}; build {theirs['build_number']}"
        f" ({theirs['build_commit']})",
        "model": f"{ours['model_type']}, {theirs['model_n_params'] / 1e6:.0f} M parameters",
        "weights": ", ".join(f"{runner.name} {runner.bytes_per_token / 1e6:.1f} MB" for runner in runners[:2])
        + " read for each token",
        "KV cache": f"{memory.kv_bytes_per_token} bytes a token, float16 on both sides",
        "read bandwidth": f"{memory.read_gb_s:.1f} GB/s ({readings[0]:.1f} - {readings[-1]:.1f} in the same runs)",
        "runs": f"{options.rounds} rounds of {options.repeats} repeats; decode of {options.decode_tokens} tokens",
    }


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    add = parser.add_argument
    add("--checkpoint", type=Path, help=f"llama or qwen2 (default: random weights of the shape {_SHAPE})")
    add("--llama-bench", type=Path, help="llama.cpp's benchmark (default: built from source)")
    add("--gguf", type=Path, help="the checkpoint for llama.cpp (default: made from it, all matrices Q4_0)")
    add("--work", type=Path, help="where to keep what is made (default: in mlcpipe's cache)")
    add("--prefill", type=_numbers, default=(16, 512, 2048), help="prompt lengths (default: 16,512,2048)")
    add("--depths", type=_numbers, default=(0, 1024, 4096), help="tokens before decoding (default: 0,1024,4096)")
    add("--decode-tokens", type=_count, default=32)
    add("--threads", type=_count, help="for both (default: the physical cores)")
    add("--rounds", type=_count, default=3, help="how often the runtimes take turns (default: %(default)s)")
    add("--repeats", type=_count, default=3, help="measurements in each process (default: %(default)s)")
    add("--foreign", type=float, default=0.1, help="cores others may use on a quiet machine (default: %(default)s)")
    add("--wait", type=float, default=300.0, help="seconds to wait for quiet (default: %(default)s)")
    add("--timeout", type=float, default=600.0, help="seconds a process may take (default: %(default)s)")
    add("--json", action="store_true", help="print JSON with every run instead of Markdown")
    add("--output", type=Path, help="write that JSON to this file as well, after each cell")
    return parser.parse_args(arguments)


def _numbers(text: str) -> tuple[int, ...]:
    """ "16,512" -> (16, 512)."""
    return tuple(int(part) for part in text.split(",") if part)


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prepare, measure, report."""
    options = _options(arguments)
    try:
        runners = prepare(options)
        table, content = measure(runners, options)
    except MlcpipeError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    sys.stdout.write(content if options.json else table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
