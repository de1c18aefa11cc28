"""Reads calls `{"name": …, "arguments": {…}}` while they stream, and passes arguments on at once."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection

from mlcpipe.runtime.sampling_params import CallPiece
from mlcpipe.runtime.text.streaming import StopMatcher
from mlcpipe.runtime.tool_formats.style import Piece, call_id

_SPACE = " \t\r\n"
_MAX_NAME = 256
ARGUMENTS = ("arguments", "parameters")
_IN_STRING = re.compile(r'["\\]')  # ends a string, or escapes its end
_OUTSIDE = re.compile(r'["{}\[\],]')  # nests or ends a value


class JsonCall:
    """One call, after its brace. `push` takes text until `done` or `failed`.

    name    that of the function, once it is known
    raw     the text before it
    pieces  decided text, for the caller to take
    names   of possible functions, None for any
    """

    def __init__(self, index: int, names: Collection[str] | None, new_id: Callable[[], str]) -> None:
        self.index = index
        self.name: str | None = None
        self.raw = ["{"]
        self.done = self.failed = False
        self.pieces: list[CallPiece] = []
        self._names, self._new_id = names, new_id
        self._state = "before_key"
        self._key = ""
        self._parts: list[str] = []  # of the current key or value
        self._streams = False  # whether that is arguments, which are passed on at once
        self._nesting = 0
        self._in_string = self._escaped = False
        self._held: list[str] = []  # arguments that came before the name
        self._any_arguments = False

    def push(self, text: str) -> str:
        """More text -> the text after the call."""
        at = 0
        while at < len(text) and not (self.done or self.failed):
            if self._state in ("key", "value"):
                at = self._read(text, at)
            elif text[at] in _SPACE:
                at += 1
            else:
                at += self._between(text[at])
        if self.name is None:
            self.raw.append(text[:at])
        return text[at:]

    def _between(self, char: str) -> int:
        """The syntax around keys and values -> 1 if it was consumed."""
        if self._state == "before_value" or (self._state == "before_key" and char == '"'):
            self._state = self._state.removeprefix("before_")
            self._streams = self._state == "value" and self._key in ARGUMENTS and char in "{["
            self._parts, self._nesting = [], 0
            return 0
        if self._state == "colon" and char == ":":
            self._state = "before_value"
        elif self._state == "before_key" and char == "}":
            self._end()
        elif self._state != "before_key" or char != ",":
            self.failed = True
            return 0
        return 1

    def _read(self, text: str, begin: int) -> int:
        """A part of a key or value -> its end."""
        at, ends = self._scan(text, begin)
        part = text[begin:at]
        if self._streams:
            self._argument(part)
        else:
            self._parts.append(part)
        if self._state == "key":
            if ends:
                self._key, self._state = str(self._loaded("".join(self._parts))), "colon"
            self.failed = self.failed or sum(map(len, self._parts)) > _MAX_NAME
        elif ends:
            self._state = "before_key"
            self._end_value()
        return at

    def _scan(self, text: str, at: int) -> tuple[int, bool]:
        """The end of a value in this text, and whether it ends here.

        Strings end at their quote, objects and lists where they close, others before a comma or brace.
        """
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            found = (_IN_STRING if self._in_string else _OUTSIDE).search(text, at)
            if found is None:
                return len(text), False
            char, at = found[0], found.end()
            if char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = not self._in_string
                if not self._in_string and self._nesting == 0:
                    return at, True
            elif char in "{[":
                self._nesting += 1
            elif self._nesting == 0:
                return at - 1, True
            elif char in "}]":
                self._nesting -= 1
                if self._nesting == 0:
                    return at, True
        return at, False

    def _end_value(self) -> None:
        if self._key == "name":
            name = self._loaded("".join(self._parts))
            known = isinstance(name, str) and name and (self._names is None or name in self._names)
            if not isinstance(name, str) or not known or self.name is not None:
                self.failed = True
                return
            self.name = name
            self.pieces.append(CallPiece(self.index, self._new_id(), name, "".join(self._held)))
        elif self._key in ARGUMENTS and not self._streams:
            text = "".join(self._parts)
            value = self._loaded(text)
            # Some models write the object as a string.
            self._argument(value if isinstance(value, str) else text)

    def _argument(self, text: str) -> None:
        self._any_arguments = True
        if self.name is None:
            self._held.append(text)
        else:
            self.pieces.append(CallPiece(self.index, arguments=text))

    def _end(self) -> None:
        if self.name is None:
            self.failed = True
            return
        if not self._any_arguments:
            self.pieces.append(CallPiece(self.index, arguments="{}"))
        self.done = True

    def _loaded(self, text: str) -> object:
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            self.failed = True
            return None


class JsonCallParser:
    """A `ToolParser` for calls in JSON.

    begins    markers before calls; the text before is content
    end       the marker after each call, "" for none
    between   allowed characters between calls and around them
    bare      names of tools, if an answer may begin with a call without a marker: other objects are content
    """

    inside = False

    def __init__(
        self,
        begins: Collection[str],
        *,
        end: str = "",
        between: str = _SPACE,
        bare: Collection[str] | None = None,
        new_id: Callable[[], str] = call_id,
    ) -> None:
        self._end, self._between, self._names, self._new_id = end, between, bare, new_id
        self._matcher = StopMatcher(tuple(begins))
        self._call = JsonCall(0, bare, new_id)
        self._count = 0
        self._tail = ""  # after a call: a possible prefix of its end marker
        self._mode = "text" if bare is None else "between"
        self._shown = False  # whether any text was given
        self._space = ""  # white space that is dropped if a call follows

    def push(self, text: str) -> list[Piece]:
        """As `ToolParser.push`."""
        out: list[Piece] = []
        while text:
            if self._mode == "text":
                text = self._read_text(text, out)
            elif self._mode == "call":
                text = self._read_call(text, out)
            else:
                text = self._read_between(text)
        return _joined(out)

    def finish(self) -> list[Piece]:
        """As `ToolParser.finish`; an unfinished call stays incomplete."""
        out: list[Piece] = []
        if self._mode == "text":
            self._text(self._matcher.flush(), out)
        elif self._mode == "call" and self._call.name is None:
            self._text("".join(self._call.raw), out)
        if self._count == 0 and self._shown:
            out += [self._space] if self._space else []
        return _joined(out)

    def _read_text(self, text: str, out: list[Piece]) -> str:
        shown, found = self._matcher.push(text)
        self._text(shown, out)
        if found:
            self._space = ""
            self._mode = "between"
        return self._matcher.rest

    def _read_between(self, text: str) -> str:
        char, rest = text[0], text[1:]
        if self._end and self._end.startswith(self._tail + char):
            self._tail += char
            if self._tail == self._end:
                self._tail, self._mode = "", "text"
        elif char == "{" and not self._tail:
            self._call, self._mode = JsonCall(self._count, self._names, self._new_id), "call"
        elif self._tail or char not in self._between:
            text, self._tail, self._mode = self._tail + text, "", "text"
            return text
        elif not self._count:
            self._space += char if self._shown else ""
        return rest

    def _read_call(self, text: str, out: list[Piece]) -> str:
        call = self._call
        rest = call.push(text)
        out += call.pieces
        call.pieces.clear()
        if call.failed:
            if call.name is None:
                self._text("".join(call.raw), out)
            else:
                self._count += 1
            self._mode = "text"
        elif call.done:
            self._count += 1
            self._mode = "between"
        return rest

    def _text(self, text: str, out: list[Piece]) -> None:
        """Text, without white space at its beginning and before a call."""
        if not text:
            return
        whole = self._space + text if self._shown else text.lstrip()
        kept = whole.rstrip()
        self._space = whole[len(kept) :]
        if kept:
            self._shown = True
            out.append(kept)


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Join adjacent pieces of one kind."""
    out: list[Piece] = []
    for piece in pieces:
        last = out[-1] if out else None
        if isinstance(piece, str) and isinstance(last, str):
            out[-1] = last + piece
        elif isinstance(piece, CallPiece) and isinstance(last, CallPiece) and piece.name is None:
            out[-1] = CallPiece(last.index, last.id, last.name, last.arguments + piece.arguments)
        else:
            out.append(piece)
    return out
