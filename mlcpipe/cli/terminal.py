"""Output of the command line: answers and tables to stdout, progress, statistics and errors to stderr."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

# Bidirectional controls reorder what the reader sees (Unicode UAX #9; CVE-2021-42574), tags (U+E00xx) and
# annotation marks hide text, surrogates cannot be encoded.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
_LINE_SEPARATORS = re.compile("[\u2028\u2029]")


def sanitize(text: str) -> str:
    """`text` without anything that steers a terminal: only printable characters, newline and tab are left."""
    return _UNSAFE.sub("", _LINE_SEPARATORS.sub("\n", text))


def stdout_console() -> Console:
    """For results; colours only on a terminal that wants them (rich honours NO_COLOR and TERM=dumb)."""
    from rich.console import Console

    return Console(highlight=False)


def stderr_console() -> Console:
    """For everything that is not the result."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def print_json(content: object) -> None:
    """One JSON document on stdout, in ASCII so that no terminal or pipe can misread it."""
    sys.stdout.write(json.dumps(content, indent=2) + "\n")
    sys.stdout.flush()


def new_table(*columns: str, whole: str = "") -> Table:
    """A table without lines; long cells wrap, except in the column `whole`, of names."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column == whole)
    return table


def print_rows(console: Console, rows: Sequence[tuple[str, str]]) -> None:
    """Names and values in two columns."""
    table = new_table()
    table.show_header = False
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(cell(name), cell(value))
    console.print(table)


def cell(text: str) -> str:
    """Untrusted text (of a manifest), escaped for a table."""
    from rich.markup import escape

    return escape(sanitize(text))


def say(console: Console, text: str, style: str = "") -> None:
    """Untrusted text, wrapped at words on a terminal only."""
    console.print(sanitize(text), style=style, markup=False, soft_wrap=not console.is_terminal)
