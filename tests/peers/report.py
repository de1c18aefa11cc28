"""From runs to a Markdown table and a JSON document."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tests.peers.runners import Cell

OURS = "mlcpipe"


@dataclass(frozen=True)
class Run:
    """One process: tokens a second, seconds, cores that others and the hypervisor used meanwhile."""

    round: int
    median: float
    low: float
    high: float
    wall_s: float
    foreign_cores: float
    steal_cores: float
    at: str


@dataclass(frozen=True)
class Line:
    """A runtime in one cell, over the quiet runs, or over all where none was quiet.

    `gb_s` (10^9 bytes of weights and KV cache a second) and `share` (of the read bandwidth) are for decoding;
    there is no share if the weights fit in the last cache.
    """

    peer: str
    median: float
    low: float
    high: float
    quiet: bool
    gb_s: float | None
    share: float | None
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class Comparison:
    """One cell: a line for each runtime, and ours over the faster of the others, run after run.

    `ratio` is (median, lowest, highest) over the rounds: neighbours in time saw the same machine.
    """

    cell: Cell
    lines: tuple[Line, ...]
    against: str
    ratio: tuple[float, float, float]


@dataclass(frozen=True)
class Memory:
    """What decode speed is compared with: GB/s (10^9 bytes) and bytes."""

    read_gb_s: float
    last_cache_bytes: int
    kv_bytes_per_token: int
    decode_tokens: int


def compare(
    cell: Cell, runs: Mapping[str, Sequence[Run]], weights: Mapping[str, int], memory: Memory, limit_cores: float
) -> Comparison:
    """`runs` has the runs of each runtime, ours among them; `weights` the bytes that each reads for a token."""
    lines = [_line(cell, name, peer_runs, weights[name], memory, limit_cores) for name, peer_runs in runs.items()]
    best = max((line for line in lines if line.peer != OURS), key=lambda line: line.median)
    theirs = {run.round: run.median for run in runs[best.peer]}
    ratios = [run.median / theirs[run.round] for run in runs[OURS]]
    return Comparison(cell, tuple(lines), best.peer, (statistics.median(ratios), min(ratios), max(ratios)))


def markdown(comparisons: Sequence[Comparison], header: Mapping[str, str]) -> str:
    """A list of the circumstances and a table with one line for each runtime and cell."""
    text = [f"- {name}: {value}" for name, value in header.items()]
    text += [
        "",
        "| | tokens | runtime | median tok/s | lowest - highest | of read bandwidth | foreign cores | ratio |",
        "|---|--:|---|--:|--:|--:|--:|--:|",
    ]
    for comparison in comparisons:
        text += [_row(comparison, line) for line in comparison.lines]
    if any(not line.quiet for c in comparisons for line in c.lines):
        text += ["", "\\* no run had a quiet machine: numbers are too low, most of all where threads spin"]
    return "\n".join(text) + "\n"


def document(comparisons: Sequence[Comparison], header: Mapping[str, str], memory: Memory) -> dict[str, Any]:
    """The same with every run, for programs."""
    return {
        "circumstances": dict(header),
        "memory": asdict(memory),
        "comparisons": [asdict(comparison) for comparison in comparisons],
    }


def _line(cell: Cell, name: str, runs: Sequence[Run], weights: int, memory: Memory, limit_cores: float) -> Line:
    quiet = [run for run in runs if run.foreign_cores <= limit_cores]
    used = quiet or runs
    median = statistics.median(run.median for run in used)
    gb_s = share = None
    if cell.kind == "decode":
        depth = cell.tokens + memory.decode_tokens / 2
        gb_s = median * (weights + memory.kv_bytes_per_token * depth) / 1e9
        share = gb_s / memory.read_gb_s if weights > memory.last_cache_bytes else None
    low, high = min(run.low for run in used), max(run.high for run in used)
    return Line(name, median, low, high, bool(quiet), gb_s, share, tuple(runs))


def _row(comparison: Comparison, line: Line) -> str:
    ours = line.peer == OURS
    median, low, high = comparison.ratio
    foreign = [run.foreign_cores for run in line.runs]
    cells = [
        comparison.cell.kind if ours else "",
        str(comparison.cell.tokens) if ours else "",
        line.peer,
        f"{line.median:.1f}" + ("" if line.quiet else "\\*"),
        f"{line.low:.1f} - {line.high:.1f}",
        "" if line.share is None else f"{100 * line.share:.0f} %",
        f"{statistics.median(foreign):.2f}",
        f"{median:.2f} ({low:.2f} - {high:.2f}) of {comparison.against}" if ours else "",
    ]
    return "| " + " | ".join(cells) + " |"
