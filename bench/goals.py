"""What is asked of mlcpipe beside llama.cpp: named sets of models and rows, each row with its goals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from bench.runners import OURS, Cell


@dataclass(frozen=True)
class Goal:
    """At least so many times as fast as `peer`; when decoding, at least this share of the read bandwidth."""

    times: float
    share: float | None = None
    peer: str = "llama.cpp"


_DECODE, _PREFILL, _BATCH = Goal(1.4, 0.88), Goal(2.5), Goal(2.5)
_ROWS = {"prefill-512": _PREFILL, "prefill-8192": _PREFILL, "decode-0": _DECODE, "decode-4096": _DECODE}
# Layers that remember: recurrent ones beside attention, convolutions, keys and values of other layers, latent ones.
GOALS: Mapping[str, Mapping[str, Mapping[str, Goal]]] = {
    "hybrids": {
        "qwen3.5-0.8b": {**_ROWS, "batch-8": _BATCH},
        **dict.fromkeys(("qwen3.5-2b", "gemma4-e2b", "granite4-h-tiny-10l", "lfm2-1.2b", "glm-4.7-flash-6l"), _ROWS),
    },
}


def goals_document(name: str) -> dict[str, Any]:
    """A set as JSON: its goals by model and row."""
    return {model: {row: asdict(goal) for row, goal in rows.items()} for model, rows in GOALS[name].items()}


def goals_table(goals: Mapping[str, Any], comparisons: list[Mapping[str, Any]]) -> list[str]:
    """Lines of Markdown: each measured row that has a goal, what was reached, and the goal."""
    lines = ["| model | row | of bandwidth (goal) | times as fast (goal) | reached |", "|---|---|--:|--:|---|"]
    for comparison in comparisons:
        cell = Cell(**comparison["cell"])
        found = goals.get(comparison["model"], {}).get(f"{cell.kind}-{cell.tokens}")
        if found is None or found["peer"] not in comparison["ratios"]:
            continue
        goal, times = Goal(**found), comparison["ratios"][found["peer"]][0]
        share = next(line["share"] for line in comparison["lines"] if line["runtime"] == OURS)
        told = goal.share is not None and share is not None
        reached = times >= goal.times and (not told or share >= goal.share)
        of_bandwidth = f"{share:.0%} ({goal.share:.0%})" if told else ""
        fields = (comparison["model"], f"{cell.kind}-{cell.tokens}", of_bandwidth, f"{times:.2f} ({goal.times:g})")
        lines.append(f"| {' | '.join(fields)} | {'yes' if reached else 'no'} |")
    return lines
