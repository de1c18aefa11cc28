"""Ends of an answer that llama-server knows beside ours: its indentation, and its time after a line."""

from __future__ import annotations

import time


class Cut:
    """Takes an answer in pieces, and says where it ends.

    n_indent  an answer ends where a later line than its first has fewer blanks before its text
    most_s    it ends this long after its first piece, once it has a line break; None is never
    """

    def __init__(self, n_indent: int, most_s: float | None) -> None:
        self.ended = False
        self._n_indent, self._most_s = n_indent, most_s
        self._began: float | None = None
        self._lines = self._blanks = 0
        self._inside = True  # a line's text; the first line is not measured

    def take(self, text: str) -> str:
        """The part of a piece that belongs to the answer."""
        now = time.monotonic()
        self._began = now if self._began is None else self._began
        kept = self._indented(text) if self._n_indent else text
        self._lines += kept.count("\n")
        late = self._most_s is not None and now - self._began > self._most_s and self._lines > 0
        self.ended = self.ended or late
        return kept

    def _indented(self, text: str) -> str:
        for index, char in enumerate(text):
            if char == "\n":
                self._inside, self._blanks = False, 0
            elif not self._inside and char in " \t":
                self._blanks += 1
            elif not self._inside:
                if self._blanks < self._n_indent:
                    self.ended = True
                    return text[:index]
                self._inside = True
        return text
