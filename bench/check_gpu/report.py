"""The table of `make check-gpu`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from bench.check_gpu.__main__ import Outcome


def show(about: Mapping[str, Any], outcomes: Sequence[Outcome]) -> None:
    """The machine, then one line per part and device."""
    console = Console(width=None)
    console.print(" · ".join(f"{name} {value}" for name, value in about.items()))
    table = Table("part", "device", "", "s", "result", box=None, pad_edge=False)
    for outcome in outcomes:
        colour = {"ok": "green", "skipped": "yellow"}.get(outcome.status, "red")
        text = outcome.reason or " · ".join(_text(name, value) for name, value in outcome.result.items())
        table.add_row(outcome.part, outcome.device, f"[{colour}]{outcome.status}[/]", f"{outcome.seconds:.0f}", text)
    console.print(table)


def _text(name: str, value: Any) -> str:
    """`decode_tok_s 12.5`; nested values in parentheses."""
    if isinstance(value, Mapping):
        return f"{name} ({', '.join(_text(key, inner) for key, inner in value.items())})"
    return f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
