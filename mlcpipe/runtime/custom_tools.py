"""OpenAI's custom tools, whose only argument is a text: any, or one of a grammar.

Models see a function of one string, `input`, as their templates know no other tools. What the model writes as that
argument is the input of the call, which this reads while it streams.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from mlcpipe.errors import UsageError
from mlcpipe.runtime.sampling_params import CallPiece
from mlcpipe.runtime.serving.lark_in_json import MAX_LARK
from mlcpipe.runtime.tool_formats.style import INPUT

_HEAD = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
_WHOLE = re.compile(r'(?:[^"\\]|\\(?:[^u]|u[0-9a-fA-F]{4}))*', re.DOTALL)
_HALF = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}$")  # of a character that takes two escapes


def parameters_of(form: object, where: str) -> tuple[dict[str, Any], str]:
    """The JSON schema of a tool's arguments, and the Lark grammar of its input, "" for none.

    `form` is `{"type": "text"}`, None for that, or a grammar with its syntax and definition: in `grammar`, as in chats,
    or beside the type, as in responses. Raises UsageError.
    """
    schema: dict[str, Any] = {"type": "string", "description": "the whole input"}
    lark = ""
    if form is not None:
        if not isinstance(form, Mapping) or form.get("type") not in ("text", "grammar"):
            raise UsageError(f"{where}.format", expected="the type text or grammar", found=repr(form)[:60])
        if form["type"] == "grammar":
            syntax, definition = _grammar(form, f"{where}.format")
            schema["description"] = f"the whole input, which must match this {syntax} grammar:\n{definition}"
            if syntax == "regex":
                schema["pattern"] = f"^(?:{definition})$"
            else:
                lark = definition
    parameters = {
        "type": "object", "properties": {INPUT: schema}, "required": [INPUT], "additionalProperties": False
    }  # fmt: skip
    return parameters, lark


def _grammar(form: Mapping[str, Any], where: str) -> tuple[str, str]:
    """The syntax and the definition."""
    given = form.get("grammar", form)
    syntax, definition = (given.get("syntax"), given.get("definition")) if isinstance(given, Mapping) else (None, None)
    if syntax not in ("lark", "regex"):
        raise UsageError(f"{where}.syntax", expected="lark or regex", found=repr(syntax)[:60])
    if not isinstance(definition, str) or not 0 < len(definition) <= MAX_LARK:
        found = f"{len(definition)} characters" if isinstance(definition, str) else type(definition).__name__
        raise UsageError(f"{where}.definition", expected=f"a grammar of at most {MAX_LARK} characters", found=found)
    return syntax, definition


def arguments_of(text: object) -> str:
    """The arguments of a call with this input."""
    return json.dumps({INPUT: text if isinstance(text, str) else ""}, ensure_ascii=False)


class InputReader:
    """Turns the arguments of calls of custom tools, which stream, into their inputs; other calls stay as they are."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._open: _Input | None = None

    def push(self, pieces: Iterable[CallPiece]) -> tuple[CallPiece, ...]:
        """The pieces that are certain."""
        return tuple(one for piece in pieces for one in self._read(piece))

    def finish(self) -> tuple[CallPiece, ...]:
        """The rest, at the end: of arguments in another form all of them."""
        opened, self._open = self._open, None
        return () if opened is None else tuple(opened.piece(opened.rest()))

    def _read(self, piece: CallPiece) -> Iterator[CallPiece]:
        if piece.name is not None:
            yield from self.finish()
            if piece.name not in self._names:
                yield piece
                return
            self._open = _Input(piece.index)
            yield replace(piece, arguments="", custom=True)
        if self._open is None or self._open.index != piece.index:
            yield piece
        else:
            yield from self._open.piece(self._open.push(piece.arguments))


class _Input:
    """The input in one call's arguments."""

    def __init__(self, index: int) -> None:
        self.index = index
        self._pending, self._inside, self._ended = "", False, False

    def piece(self, text: str) -> Iterator[CallPiece]:
        """A piece with this text, if any."""
        if text:
            yield CallPiece(self.index, arguments=text, custom=True)

    def push(self, text: str) -> str:
        """More arguments -> the text that they add."""
        if self._ended:
            return ""
        self._pending += text
        if not self._inside:
            if (head := _HEAD.match(self._pending)) is None:
                return ""
            self._inside, self._pending = True, self._pending[head.end() :]
        found = _WHOLE.match(self._pending)
        assert found is not None
        end = found.end()
        self._ended = self._pending[end : end + 1] == '"'
        if not self._ended and (half := _HALF.search(self._pending, max(0, end - 6), end)):
            end = half.start()
        whole, self._pending = self._pending[:end], self._pending[end:]
        return _unescaped(whole)

    def rest(self) -> str:
        """What is left of arguments that ended early, or were written in another form."""
        return "" if self._ended or self._inside else self._pending


def _unescaped(text: str) -> str:
    try:
        return str(json.loads(f'"{text}"', strict=False))
    except ValueError:  # of an escape that JSON does not have
        return text
