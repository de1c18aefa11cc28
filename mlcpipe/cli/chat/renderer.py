"""What shows an answer while it streams, and plain text, which needs no terminal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from mlcpipe.cli.terminal import sanitize
from mlcpipe.runtime.text.reasoning import BEGIN, END


class Renderer(Protocol):
    """Takes the pieces of an answer as they come."""

    def think(self, text: str) -> None:
        """Show more of the thoughts, which come before the answer."""

    def feed(self, text: str) -> None:
        """Show more of the answer."""

    def close(self) -> None:
        """Show the held text; the answer is over."""


class PlainRenderer:
    """Passes text on without markup, thoughts in `<think>`: for pipes, NO_COLOR and dumb terminals."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._thinks = False

    def think(self, text: str) -> None:
        """Write thoughts, sanitized."""
        self._write(("" if self._thinks else f"{BEGIN}\n") + sanitize(text))
        self._thinks = True

    def feed(self, text: str) -> None:
        """Write the text, sanitized."""
        self._end_thoughts("\n\n")
        self._write(sanitize(text))

    def close(self) -> None:
        """End thoughts that have no answer."""
        self._end_thoughts("\n")

    def _end_thoughts(self, gap: str) -> None:
        if self._thinks:
            self._write(f"\n{END}{gap}")
        self._thinks = False


class WithoutThoughts:
    """Shows the answer alone."""

    def __init__(self, renderer: Renderer) -> None:
        self.feed, self.close = renderer.feed, renderer.close

    def think(self, text: str) -> None:
        """Shows nothing."""
