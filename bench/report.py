"""From runs to a JSON document, and from that to Markdown tables.

python -m bench.report RESULT.json
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.goals import goals_table
from bench.runners import OURS, Cell, Reading

_WEIGHTS = {0: "weights of a GGUF file", 4: "4-bit weights", 8: "8-bit weights"}


@dataclass(frozen=True)
class Run:
    """One cell in one process: its result, and seconds and cores that others and the hypervisor used meanwhile.

    `read_gb_s` is the read bandwidth that our process measured between its repeats, and `share` what decoding had of it.
    """

    round: int
    reading: Reading
    wall_s: float
    foreign_cores: float
    steal_cores: float
    at: str
    read_gb_s: tuple[float, ...] = ()
    share: float | None = None


@dataclass(frozen=True)
class Traffic:
    """Bytes that decoding reads: weights a token by runtime, the KV cache a token and token of depth by runtime."""

    weights: Mapping[str, int]
    kv: Mapping[str, float]
    decode_tokens: int
    last_cache_bytes: int

    def per_token(self, runtime: str, depth: int) -> float:
        """On average over the decoded tokens."""
        return self.weights[runtime] + self.kv[runtime] * (depth + self.decode_tokens / 2)


@dataclass(frozen=True)
class Line:
    """A runtime in one cell, over the quiet runs, or over all where none was quiet; tokens/s, seconds or bytes.

    `share` of the read bandwidth is for decoding: ours as our process says, that of others over the median of what ours
    measured in all rounds. There is none if the weights fit in the last cache.
    """

    runtime: str
    peer: str
    median: float
    low: float
    high: float
    quiet: bool
    share: float | None
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class Comparison:
    """One cell: a line for each runtime, and how many times better ours is than the best of each peer's.

    `ratios` are (median, lowest, highest) over the rounds by peer: neighbours in time saw the same machine. More
    than 1 is better, also where less is better.
    """

    model: str
    quantization: str
    bits: int
    cell: Cell
    lines: tuple[Line, ...]
    ratios: Mapping[str, tuple[float, float, float]]


def compare(
    subject: tuple[str, str, int],
    cell: Cell,
    runs: Mapping[str, Sequence[Run]],
    peers: Mapping[str, str],
    traffic: Traffic,
    limit_cores: float,
) -> Comparison:
    """`runs` has the runs of each runtime, ours among them; `peers` the name that its variants share."""
    read = [gb_s for run in runs[OURS] for gb_s in run.read_gb_s]
    ceiling = statistics.median(read) if read and cell.kind == "decode" else None
    lines = [_line(cell, name, peers[name], some, traffic, ceiling, limit_cores) for name, some in runs.items()]
    ratios = {}
    for peer in dict.fromkeys(line.peer for line in lines if line.peer != OURS):
        best = _best(cell, [line for line in lines if line.peer == peer])
        theirs = {run.round: run.reading.median for run in runs[best.runtime]}
        pairs = [(run.reading.median, theirs[run.round]) for run in runs[OURS] if run.round in theirs]
        some = [a / b if cell.more_is_better else b / a for a, b in pairs]
        ratios[peer] = statistics.median(some), min(some), max(some)
    return Comparison(*subject, cell, tuple(lines), ratios)


def _best(cell: Cell, lines: Sequence[Line]) -> Line:
    return max(lines, key=lambda line: line.median if cell.more_is_better else -line.median)


def _line(
    cell: Cell,
    name: str,
    peer: str,
    runs: Sequence[Run],
    traffic: Traffic,
    ceiling_gb_s: float | None,
    limit_cores: float,
) -> Line:
    quiet = [run for run in runs if run.foreign_cores <= limit_cores]
    used = quiet or runs
    median = statistics.median(run.reading.median for run in used)
    share = None
    if ceiling_gb_s is not None and traffic.weights[name] > traffic.last_cache_bytes:
        said = [run.share for run in used if run.share is not None]
        computed = median * traffic.per_token(name, cell.tokens) / 1e9 / ceiling_gb_s
        share = statistics.median(said) if said else computed
    low, high = min(run.reading.low for run in used), max(run.reading.high for run in used)
    return Line(name, peer, median, low, high, bool(quiet), share, tuple(runs))


def document(comparisons: Sequence[Comparison], circumstances: Mapping[str, str]) -> dict[str, Any]:
    """Everything, for programs; `markdown` reads it."""
    return {"circumstances": dict(circumstances), "comparisons": [asdict(comparison) for comparison in comparisons]}


def merge(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Both documents as one: what `new` has, and what only `old` has."""

    def key(comparison: Mapping[str, Any]) -> tuple[object, ...]:
        cell = comparison["cell"]
        return comparison["model"], comparison["quantization"], cell["kind"], cell["tokens"]

    cells = {key(c): c for c in (*old["comparisons"], *new["comparisons"])}
    circumstances = {**old["circumstances"], **new["circumstances"]}
    return {**old, **new, "circumstances": circumstances, "comparisons": list(cells.values())}


def markdown(content: Mapping[str, Any]) -> str:
    """A list of the circumstances, a table for each model and kind of weights, and one of goals if it has any."""
    text = [f"- {name}: {value}" for name, value in content["circumstances"].items()]
    tables: dict[tuple[str, str, int], list[Mapping[str, Any]]] = {}
    for comparison in content["comparisons"]:
        key = comparison["model"], comparison["quantization"], comparison["bits"]
        tables.setdefault(key, []).append(comparison)
    for (model, quantization, bits), comparisons in tables.items():
        peers = list(dict.fromkeys(peer for comparison in comparisons for peer in comparison["ratios"]))
        text += ["", f"{model}, {_WEIGHTS[bits]} ({quantization}):", "", *_table(comparisons, peers)]
    if goals := content.get("goals"):
        text += ["", "Goals, by medians:", "", *goals_table(goals, content["comparisons"])]
    if any(not line["quiet"] for c in content["comparisons"] for line in c["lines"]):
        text += ["", "\\* no run had a quiet machine: such numbers are too low, most of all where threads spin"]
    return "\n".join(text) + "\n"


def _table(comparisons: Sequence[Mapping[str, Any]], peers: Sequence[str]) -> list[str]:
    shares = any(line["share"] is not None for comparison in comparisons for line in comparison["lines"])
    heads = ["", OURS, *(["of bandwidth"] if shares else [])]
    for peer in peers:
        heads += [peer, f"{OURS} / it"]
    rows = ["| " + " | ".join(heads) + " |", "|---|" + "--:|" * (len(heads) - 1)]
    for comparison in comparisons:
        cell = Cell(**comparison["cell"])
        lines = [Line(**line) for line in comparison["lines"]]
        ours = next(line for line in lines if line.runtime == OURS)
        fields = [_title(cell), _value(cell, ours)]
        if shares:
            fields.append("" if ours.share is None else f"{100 * ours.share:.0f} %")
        for peer in peers:
            theirs = [line for line in lines if line.peer == peer]
            if not theirs:
                fields += ["", ""]
                continue
            best = _best(cell, theirs)
            variant = best.runtime.removeprefix(peer).strip()
            median, low, high = comparison["ratios"][peer]
            share = "" if best.share is None else f", {100 * best.share:.0f} %"
            variant = f" ({variant}{share})" if variant else f" ({share[2:]})" if share else ""
            fields += [_value(cell, best) + variant, f"{median:.2f} ({low:.2f} - {high:.2f})"]
        rows.append("| " + " | ".join(fields) + " |")
    return rows


def _title(cell: Cell) -> str:
    return {
        "prefill": f"prefill {cell.tokens}, tok/s",
        "decode": f"decode, depth {cell.tokens}, tok/s",
        "batch": f"decode {cell.tokens} together, tok/s",
        "load": "load to first token" + (f" of a prompt of {cell.tokens}" if cell.tokens > 1 else "") + ", s",
        "memory": f"peak memory, prefill {cell.tokens}, MB",
    }[cell.kind]


def _value(cell: Cell, line: Line) -> str:
    mark = "" if line.quiet else "\\*"
    if cell.kind == "memory":
        return f"{line.median / 1e6:.0f}{mark}"
    if cell.kind == "load":
        return f"{line.median:.2f}{mark}"
    return f"{line.median:.{0 if line.median >= 200 else 1 if line.median >= 2 else 2}f}{mark}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables of a file that `bench_peers --output` wrote."""
    (path,) = sys.argv[1:] if arguments is None else arguments
    sys.stdout.write(markdown(json.loads(Path(path).read_text(encoding="utf-8"))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
