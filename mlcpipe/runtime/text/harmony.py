"""Answers in OpenAI's harmony format, which gpt-oss writes: messages, each on a channel and perhaps to a recipient.

A prompt ends with `<|start|>assistant`; what follows is a header, `<|message|>`, a text and a token that ends it, then
perhaps `<|start|>` and the next one. Channels are `analysis` (thoughts), `commentary` and `final`. A header says
`<|channel|>NAME`, and `to=RECIPIENT` before or after it. Source: the format's guide, cookbook.openai.com "OpenAI
harmony response format" (2025).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlcpipe.runtime.text.streaming import StopMatcher, TextStream

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)
ANALYSIS, COMMENTARY, FINAL = "analysis", "commentary", "final"
THINK_BEGIN, THINK_END = "<think>\n", "\n</think>\n\n"
_BEGINS = (CHANNEL, START, "to=")  # of the first header
_MAX_HEADER = 1024  # characters; a longer one is text
_THOUGHTS = re.compile(r"<think>\n(.*?)(</think>\s*|$)", re.DOTALL)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


def is_harmony(template: str) -> bool:
    """Whether a chat template has this format."""
    return all(mark in template for mark in (START, CHANNEL, MESSAGE))


@dataclass(frozen=True)
class Part:
    """A part of a message; `begins`: the first one, which has no text."""

    channel: str
    recipient: str = ""
    text: str = ""
    begins: bool = False


class HarmonyReader:
    """Takes an answer's text, with its marks, piece by piece; returns parts of messages.

    An answer that does not begin with a header is one message on the channel `final`.
    """

    def __init__(self) -> None:
        self._header: str | None = ""  # so far; None inside a message
        self._matcher = StopMatcher([END, CALL, RETURN, START, CHANNEL])
        self._part = Part(FINAL)
        self._any = False  # whether a message has begun

    @property
    def thinks(self) -> bool:
        """Whether the message that comes is thoughts."""
        return self._header is None and self._part.channel == ANALYSIS

    def push(self, text: str) -> list[Part]:
        """The parts that are certain now."""
        out: list[Part] = []
        while text:
            text = self._read_text(text, out) if self._header is None else self._read_header(self._header + text, out)
        return out

    def finish(self) -> list[Part]:
        """The rest, at the end of the answer; an unfinished header is dropped."""
        if self._header is None:
            rest = self._matcher.flush()
            return [self._of(rest)] if rest else []
        header, self._header = self._header, ""
        if self._any or not header.strip() or "<|" in header:
            return []
        return [Part(FINAL, begins=True), Part(FINAL, text=header)]

    def _of(self, text: str) -> Part:
        return Part(self._part.channel, self._part.recipient, text)

    def _read_header(self, header: str, out: list[Part]) -> str:
        head, ended, rest = header.partition(MESSAGE)
        start = header.lstrip()
        plain = not self._any and not any(one.startswith(start) or start.startswith(one) for one in _BEGINS)
        if not ended and not plain and len(header) <= _MAX_HEADER:
            self._header = header
            return ""
        self._header, self._any = None, True
        if plain or not ended:
            self._part = Part(FINAL, begins=True)
            out += [self._part] if plain else [self._part, self._of(header)]
            return header if plain else ""
        channel, recipient = _CHANNEL.search(head), _RECIPIENT.search(head)
        self._part = Part(channel[1] if channel else FINAL, recipient[1] if recipient else "", begins=True)
        out.append(self._part)
        return rest

    def _read_text(self, text: str, out: list[Part]) -> str:
        shown, ended = self._matcher.push(text)
        if shown:
            out.append(self._of(shown))
        if ended:
            self._header = CHANNEL if self._matcher.found == CHANNEL else ""
        return self._matcher.rest


class HarmonyText:
    """As `TextStream`, of all messages: thoughts are between `<think>` and `</think>`, as other models have them."""

    def __init__(self, stream: TextStream) -> None:
        """`stream` shows `MARKS`."""
        self._stream = stream
        self._reader = HarmonyReader()
        self._last = ""  # the channel of the text so far

    @property
    def stopped(self) -> str | None:
        """As that of the stream."""
        return self._stream.stopped

    def push(self, token_id: int) -> str:
        """Text that is certain after this token."""
        return "".join(map(self._shown, self._reader.push(self._stream.push(token_id))))

    def flush(self) -> str:
        """The rest, after the last token."""
        parts = self._reader.push(self._stream.flush()) + self._reader.finish()
        end = THINK_END if self._last == ANALYSIS and not any(part.begins for part in parts) else ""
        return "".join(map(self._shown, parts)) + end.rstrip()

    def _shown(self, part: Part) -> str:
        if not part.text:
            return ""
        before, self._last = self._last, part.channel
        if part.channel == before:
            return part.text
        begin = THINK_BEGIN if part.channel == ANALYSIS else "\n\n" if before == COMMENTARY else ""
        return (THINK_END if before == ANALYSIS else "") + begin + part.text


def without_thoughts(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages without the thoughts that `HarmonyText` writes into answers; those before a call become `thinking`."""
    return [
        _without(message, message["content"])
        if message.get("role") == "assistant" and isinstance(message.get("content"), str)
        else dict(message)
        for message in messages
    ]


def _without(message: Mapping[str, Any], content: str) -> dict[str, Any]:
    found = _THOUGHTS.search(content) if message.get("tool_calls") else None
    return {**message, "content": _THOUGHTS.sub("", content)} | ({"thinking": found[1].strip()} if found else {})
