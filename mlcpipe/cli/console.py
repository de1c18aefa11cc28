"""Where the command line writes: answers and tables to stdout, progress, statistics and errors to stderr."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mlcpipe.cli.markdown import MarkdownRenderer, PlainRenderer, Renderer, sanitize

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


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


class Screen:
    """Writes answers to stdout, at once because they are read while they are made."""

    def __init__(self) -> None:
        console = stdout_console()
        self._plain = not console.is_terminal or console.is_dumb_terminal or console.no_color or console.legacy_windows
        self._at_line_start = True
        self._waiting = False

    def wait(self) -> None:
        """Show that an answer is on its way; the first write takes the sign away."""
        if not self._plain:
            self.write("\x1b[2m...\x1b[0m")
            self._waiting, self._at_line_start = True, True

    def renderer(self) -> Renderer:
        """Markdown on a terminal that can show it, else plain text."""
        if self._plain:
            return PlainRenderer(self.write)
        unicode = (sys.stdout.encoding or "").lower().replace("-", "").startswith("utf")
        return MarkdownRenderer(self.write, terminal_columns, unicode=unicode)

    def write(self, text: str) -> None:
        """Write text that is safe for a terminal."""
        if self._waiting:
            sys.stdout.write("\r\x1b[K")  # ECMA-48 EL: erase to the end of the line
            self._waiting = False
        sys.stdout.write(text)
        sys.stdout.flush()
        if text:
            self._at_line_start = text.endswith("\n")

    def fresh_line(self) -> None:
        """Go to a new line unless the answer ended with one."""
        self.write("")
        if not self._at_line_start:
            self.write("\n")


@contextmanager
def no_echo() -> Iterator[None]:
    """Keys that are pressed during an answer, Ctrl-C too, do not show up in the middle of it."""
    if sys.platform == "win32" or not sys.stdin.isatty():
        yield
        return
    import termios

    before = termios.tcgetattr(sys.stdin)
    silent = list(before)
    silent[3] &= ~termios.ECHO  # local flags, termios(3)
    termios.tcsetattr(sys.stdin, termios.TCSADRAIN, silent)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def terminal_columns() -> int:
    """The width of the terminal now; it may change while an answer runs."""
    return shutil.get_terminal_size((80, 24)).columns


def new_table(*columns: str) -> Table:
    """A table without lines; long cells go on in the next line."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column, overflow="fold")
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
    """Text that may come from anywhere (a manifest), as a table may show it."""
    from rich.markup import escape

    return escape(sanitize(text))


def say(console: Console, text: str, style: str = "") -> None:
    """Text that may come from anywhere, broken at words on a terminal and not at all elsewhere."""
    console.print(sanitize(text), style=style, markup=False, soft_wrap=not console.is_terminal)


def byte_size(count: float) -> str:
    """A size for people: "1.50 GiB"."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.2f} {unit}"
        count /= 1024
    raise AssertionError("the loop returns at its last unit")
