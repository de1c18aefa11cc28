"""Turn generated token ids into text that is safe to show at once.

Two things hold text back: a character whose bytes are not complete, and the longest suffix that may still become a
stop string. A token takes time by its own length, not by that of the text so far.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from mlcpipe.errors import UsageError
from mlcpipe.runtime.text.token_bytes import Piece
from mlcpipe.runtime.text.tokenizer import Tokenizer

# Bytes of a byte-fallback run that wait for its end. The library replaces *every* byte of a run that is not UTF-8 as a
# whole, so its text is certain only when the run ends. Scripts that a vocabulary lacks are one run a word or longer;
# past this many bytes (16 CJK characters) whole characters are shown at once, and only what follows can be replaced.
MAX_RUN_BYTES = 48


class TextStream:
    """Takes token ids, returns text; one object per answer.

    `push(token_id)` returns what can be shown now, `flush()` the rest when generation ends for another reason
    (length). `stopped` is "stop" once an id of `eos_ids` or a stop string came. The texts together are
    `tokenizer.decode(ids)` cut before the stop; special tokens are skipped.

    `continues` keeps the space that starts the first token, for text that continues a prompt. Special tokens of
    `shown` are written by name.

    Raises UsageError for an empty stop string.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        eos_ids: Collection[int] = (),
        *,
        continues: bool = False,
        shown: Collection[int] = (),
    ) -> None:
        if isinstance(stop, str):
            stop = (stop,)
        self.stopped: str | None = None
        self._tokenizer = tokenizer
        self._eos = frozenset(eos_ids)
        self._shown = frozenset(shown)
        self._stops = StopMatcher(stop) if stop else None
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._run = bytearray()
        self._run_state = "whole"  # "long" once characters were shown early, "broken" once it cannot be UTF-8
        self._first = True
        self._strip_char, self._strip_left = ("", 0) if continues else tokenizer.rules.strip
        self._drop_first = tokenizer.rules.drop_first and not continues
        self._separator = tokenizer.rules.separator.encode("utf-8")

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text; None if something else did, or nothing yet."""
        return None if self._stops is None else self._stops.found

    def push(self, token_id: int) -> str:
        """Text that is certain after this token; after a stop always ""."""
        if self.stopped is not None:
            return ""
        if token_id in self._eos:
            text = self._finish()
            # The held text may itself have completed a stop string; either way the answer has ended.
            self.stopped = "stop"
            return text
        piece = self._tokenizer.piece(token_id, first=self._first and self._drop_first)
        if piece is None and token_id in self._shown:
            piece = Piece(self._tokenizer.token_bytes(token_id))
        if piece is None:
            return ""
        data = piece.data
        if self._separator and not self._first:
            data = self._separator + data
        self._first = False
        if piece.is_byte:
            text = self._grow_run(data)
        elif self._run:
            text = self._end_run() + self._utf8.decode(data)
        else:
            text = self._utf8.decode(data)
        return self._release(text) if text else ""

    def flush(self) -> str:
        """The withheld text, after the last token; "" after a stop."""
        return "" if self.stopped is not None else self._finish()

    def _finish(self) -> str:
        text = self._release(self._end_run() + self._utf8.decode(b"", final=True))
        if self._stops is not None and self.stopped is None:
            text += self._stops.flush()
        return text

    def _release(self, text: str) -> str:
        """Drops the decoder's leading strip and looks for stop strings."""
        while self._strip_left and text:
            if text[0] != self._strip_char:
                self._strip_left = 0
                break
            text = text[1:]
            self._strip_left -= 1
        if self._stops is None:
            return text
        text, found = self._stops.push(text)
        if found:
            self.stopped = "stop"
        return text

    def _grow_run(self, data: bytes) -> str:
        self._run += data
        if self._run_state == "whole" and len(self._run) < MAX_RUN_BYTES:
            return ""
        if self._run_state != "broken":
            try:
                text, used = codecs.utf_8_decode(self._run, "strict", False)
            except UnicodeDecodeError:
                self._run_state = "broken"
            else:
                self._run_state = "long"
                del self._run[:used]
                return text
        return self._replaced_run()

    def _end_run(self) -> str:
        self._run_state = "whole"
        try:
            text = self._run.decode("utf-8")
        except UnicodeDecodeError:
            return self._replaced_run()
        self._run.clear()
        return text

    def _replaced_run(self) -> str:
        """The library's rule: a run that is not UTF-8 as a whole is one U+FFFD per byte."""
        count = len(self._run)
        self._run.clear()
        return "\N{REPLACEMENT CHARACTER}" * count


@dataclass(slots=True)
class _Node:
    """A prefix of a stop string: `depth` characters, `fail` the longest proper suffix that is a prefix too."""

    depth: int
    children: dict[str, _Node]
    fail: _Node | None = None
    match: int = 0  # length of the longest stop string that ends here


class StopMatcher:
    """Aho-Corasick automaton (Aho & Corasick, CACM 18(6), 1975) that withholds the longest possible start of a stop.

    The first stop string to be complete wins; of those that end together, the longest. `rest` is the text after it.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._root = _Node(0, {})
        for stop in stops:
            if not isinstance(stop, str) or not stop:
                raise UsageError("stop", expected="strings that are not empty", found=repr(stop))
            node = self._root
            for char in stop:
                node = node.children.setdefault(char, _Node(node.depth + 1, {}))
            node.match = len(stop)
        self._link()
        self._state = self._root
        self._held = ""
        self.found: str | None = None
        self.rest = ""

    def push(self, text: str) -> tuple[str, bool]:
        """(text to show, whether a stop string is complete); text after it is treated as a new beginning."""
        root, state = self._root, self._state
        for index, char in enumerate(text):
            child = state.children.get(char)
            while child is None and state.fail is not None:
                state = state.fail
                child = state.children.get(char)
            state = child or root
            if state.match:
                seen = self._held + text[: index + 1]
                self._held, self._state, self.rest = "", root, text[index + 1 :]
                self.found = seen[len(seen) - state.match :]
                return seen[: len(seen) - state.match], True
        self._state, self.rest = state, ""
        seen = self._held + text
        cut = len(seen) - state.depth
        self._held = seen[cut:]
        return seen[:cut], False

    def flush(self) -> str:
        """The withheld text, when no more comes."""
        held, self._held, self._state = self._held, "", self._root
        return held

    def _link(self) -> None:
        queue = deque([self._root])
        while queue:
            node = queue.popleft()
            for char, child in node.children.items():
                fail = node.fail
                while fail is not None and char not in fail.children:
                    fail = fail.fail
                child.fail = self._root if fail is None else fail.children[char]
                child.match = child.match or child.fail.match
                queue.append(child)
