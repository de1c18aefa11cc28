"""Reads an answer token by token: its text, its reasoning, its tool calls."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mlcpipe.runtime.custom_tools import InputReader
from mlcpipe.runtime.sampling_params import CallPiece
from mlcpipe.runtime.serving.grammar import Thinking
from mlcpipe.runtime.text.harmony import THINK_BEGIN, THINK_END
from mlcpipe.runtime.text.reasoning import ReasoningSplitter
from mlcpipe.runtime.text.streaming import TextStream
from mlcpipe.runtime.text.tokenizer import Tokenizer
from mlcpipe.runtime.tool_formats.style import Thought, Tool, ToolFormat


@dataclass(frozen=True)
class Reading:
    """How to parse an answer.

    stops     strings that end it
    continues whether it continues a text, keeping the space before the first word
    thinking  whether it begins with reasoning, or may
    style     of calls, with the callable tools; None reads everything as text
    shown     control tokens that the style reads
    one_call  whether to drop a second call
    silent    whether the answer shall have no token: the prompt alone was asked for
    thoughts  whether reasoning is given
    """

    stops: Sequence[str] = ()
    continues: bool = False
    thinking: Thinking = "none"
    style: ToolFormat | None = None
    tools: Sequence[Tool] = ()
    shown: Sequence[int] = ()
    one_call: bool = False
    silent: bool = False
    thoughts: bool = True


class Part(NamedTuple):
    """What a part of an answer adds."""

    text: str
    reasoning: str
    calls: tuple[CallPiece, ...]


class AnswerReader:
    """Takes the tokens of one answer."""

    def __init__(self, tokenizer: Tokenizer, reading: Reading, stop_ids: Collection[int]) -> None:
        self._text = TextStream(tokenizer, reading.stops, stop_ids, continues=reading.continues, shown=reading.shown)
        thinks = reading.thinking != "none"
        self._splitter = ReasoningSplitter(open=reading.thinking == "open") if thinks else None
        self._parser = None if reading.style is None else reading.style.parser(reading.tools)
        custom = {tool.name for tool in reading.tools if tool.custom}
        self._inputs = InputReader(custom) if custom else None
        self._one_call = reading.one_call
        self._called = False

    @property
    def inside(self) -> bool:
        """Whether the current text is reasoning."""
        return any(reader is not None and reader.inside for reader in (self._splitter, self._parser))

    @property
    def stopped(self) -> str | None:
        """The text that ended the answer, as `TextStream.stopped`."""
        return self._text.stopped

    @property
    def stop_string(self) -> str | None:
        """The string of `stops` that ended the answer."""
        return self._text.stop_string

    def finish_reason(self, *, cut_off: bool) -> str:
        """Why the answer ended: stop, tool_calls, or length where it was `cut_off` before a stop."""
        if cut_off and self.stopped is None:
            return "length"
        return "tool_calls" if self._called else "stop"

    def read(self, token: int | None, *, last: bool) -> Part:
        """A token, if any; with the `last` one, or where the answer `stopped`, all that was held back too."""
        text = "" if token is None else self._text.push(token)
        if last := last or self._text.stopped is not None:
            text += self._text.flush()
        reasoning = ""
        if self._splitter is not None:
            reasoning, text = self._splitter.push(text)
            if last:
                more, rest = self._splitter.finish()
                reasoning, text = reasoning + more, text + rest
        if self._parser is None:
            return Part(text, reasoning, ())
        pieces = [*self._parser.push(text), *(self._parser.finish() if last else ())]
        reasoning += "".join(piece.text for piece in pieces if isinstance(piece, Thought))
        calls = tuple(piece for piece in pieces if isinstance(piece, CallPiece))
        self._called = self._called or bool(calls)
        if self._one_call:
            calls = tuple(piece for piece in calls if piece.index == 0)
        if self._inputs is not None:
            calls = (*self._inputs.push(calls), *(self._inputs.finish() if last else ()))
        return Part("".join(piece for piece in pieces if isinstance(piece, str)), reasoning, calls)


class CallingText:
    """As `TextStream`, of an answer that may call tools: thoughts are between `<think>` and `</think>`, calls apart."""

    def __init__(self, reader: AnswerReader, *, opened: bool) -> None:
        """`opened`: whether the prompt has begun the thoughts."""
        self._reader, self._thinks = reader, opened
        self._calls: list[CallPiece] = []

    @property
    def stopped(self) -> str | None:
        """As that of the stream."""
        return self._reader.stopped

    def push(self, token_id: int) -> str:
        """Text that is certain after this token."""
        return self._shown(self._reader.read(token_id, last=False))

    def flush(self) -> str:
        """The rest, after the last token."""
        return "" if self.stopped is not None else self._shown(self._reader.read(None, last=True))

    def take_calls(self) -> tuple[CallPiece, ...]:
        """The pieces of calls since the last time."""
        taken, self._calls = tuple(self._calls), []
        return taken

    def finish_reason(self, reason: str) -> str:
        """The reason if the answer ends with `reason`."""
        return self._reader.finish_reason(cut_off=reason == "length")

    def _shown(self, part: Part) -> str:
        self._calls += part.calls
        text = part.reasoning if self._thinks or not part.reasoning else THINK_BEGIN + part.reasoning
        self._thinks = self._thinks or bool(part.reasoning)
        if self._thinks and (part.text or part.calls):
            text, self._thinks = text + THINK_END, False
        return text + part.text
