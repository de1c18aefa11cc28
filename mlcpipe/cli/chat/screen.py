"""The terminal during an answer: cursor, echo of keys, width."""

from __future__ import annotations

import base64
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from mlcpipe.cli.chat.markdown import MarkdownRenderer
from mlcpipe.cli.chat.renderer import PlainRenderer, Renderer, WithoutThoughts
from mlcpipe.cli.terminal import sanitize, stdout_console
from mlcpipe.errors import UsageError


class Screen:
    """Writes answers to stdout, flushed at once, as they are read while they stream."""

    def __init__(self, *, hide_thinking: bool = False) -> None:
        console = stdout_console()
        self._hides = hide_thinking
        self._plain = not console.is_terminal or console.is_dumb_terminal or console.no_color or console.legacy_windows
        self._at_line_start = True
        self._waiting = False

    def wait(self) -> None:
        """Show that an answer is coming; the first write removes the sign."""
        if not self._plain:
            self.write("\x1b[2m...\x1b[0m")
            self._waiting, self._at_line_start = True, True

    def renderer(self) -> Renderer:
        """Markdown on a terminal that can show it, else plain text."""
        unicode = (sys.stdout.encoding or "").lower().replace("-", "").startswith("utf")
        shown: Renderer = PlainRenderer(self.write)
        if not self._plain:
            shown = MarkdownRenderer(self.write, terminal_columns, unicode=unicode)
        return WithoutThoughts(shown) if self._hides else shown

    def copy(self, text: str) -> None:
        """Give text to the terminal's clipboard (xterm's control sequence OSC 52). Raises UsageError without one."""
        if self._plain:
            raise UsageError("this terminal has no clipboard", next_step="/save FILE writes the chat")
        sys.stdout.write(f"\x1b]52;c;{base64.b64encode(sanitize(text).encode()).decode()}\x07")
        sys.stdout.flush()

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
        """Start a new line unless the answer ended with one."""
        self.write("")
        if not self._at_line_start:
            self.write("\n")


@contextmanager
def no_echo() -> Iterator[None]:
    """Keys pressed during an answer, Ctrl-C included, are not echoed into it.

    They can be read one by one, not line by line; Ctrl-C is still a signal.
    """
    if sys.platform == "win32" or not sys.stdin.isatty():
        yield
        return
    import termios

    before = termios.tcgetattr(sys.stdin)
    silent = list(before)
    silent[3] &= ~(termios.ECHO | termios.ICANON)  # local flags, termios(3)
    termios.tcsetattr(sys.stdin, termios.TCSADRAIN, silent)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def terminal_columns() -> int:
    """The width of the terminal now; it may change while an answer runs."""
    return shutil.get_terminal_size((80, 24)).columns
