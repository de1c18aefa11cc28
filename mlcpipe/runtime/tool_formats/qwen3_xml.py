"""Qwen3-Coder: `<tool_call><function=name><parameter=key>value</parameter>…</function></tool_call>`.

A value is text between newlines; the tool's schema says which values are JSON. Source: the chat template of
Qwen/Qwen3-Coder-30B-A3B-Instruct.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

from mlcpipe.runtime.response_format import ANY_OBJECT
from mlcpipe.runtime.sampling_params import CallPiece
from mlcpipe.runtime.serving.grammar import GrammarSource
from mlcpipe.runtime.text.streaming import StopMatcher
from mlcpipe.runtime.tool_formats.style import (
    Literal,
    Messages,
    Piece,
    Style,
    Tool,
    ToolParser,
    call_id,
    in_tags,
    quoted,
    to_template,
)
from mlcpipe.runtime.tool_formats.xml_values import Rules, Values

BEGIN, END = "<tool_call>", "</tool_call>"
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)(?:</function>\s*|$)", re.DOTALL)
_BEGIN = re.compile(r"<parameter=([^>\n]+)>\n?")
_END = re.compile(r"\n?</parameter>")
_NESTED = re.compile(r"\s*(?=[\[{])")
_DECODER = json.JSONDecoder()


class Qwen3Xml(Style):
    """Calls in tags with names and values."""

    name = "qwen3_xml"
    shown: Collection[str] = (BEGIN, END)

    def detect(self, template: str) -> bool:
        """Whether the template writes names in tags."""
        return BEGIN in template and "<function=" in template

    def prepare(self, messages: Messages, tools: Sequence[Tool]) -> tuple[Messages, dict[str, Any]]:
        """The template writes the tools."""
        return to_template(messages, tools)

    def grammar(self, tools: Sequence[Tool], literal: Literal, *, forced: bool, parallel: bool) -> GrammarSource | None:
        """From the tag on, a tool's name and its parameters in their order; before it any text, unless forced."""
        rules = Rules()
        for index, tool in enumerate(tools):
            begin = quoted(f"<function={tool.name}>\n")
            rules.lines.append(f'tool_{index}: {begin} {rules.arguments(tool)} "</function>\\n"')
        some = " | ".join(f"tool_{index}" for index in range(len(tools)))
        text = in_tags(literal(BEGIN), f'"\\n" ({some}) {literal(END)}', forced=forced, parallel=parallel)
        parts = tuple((name, schema) for schema, name in rules.parts.items())
        lark_parts = tuple((name, lark) for lark, name in rules.lark_parts.items())
        return GrammarSource("lark", "\n".join([text, *rules.lines, ""]), parts, lark_parts)

    def parser(self, tools: Sequence[Tool]) -> ToolParser:
        """The parser of tags; a call arrives in one piece at its end."""
        return _XmlParser(tools)


class _XmlParser:
    inside = False

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._values = {tool.name: Values(tool) for tool in tools}
        self._matcher = StopMatcher([BEGIN])
        self._inside = False
        self._count = 0
        self._text: list[str] = []  # of a call
        self._seen = 0  # parts of it already read by `_in_value`
        self._open = False  # whether a parameter is open there

    def push(self, text: str) -> list[Piece]:
        out: list[Piece] = []
        while text:
            shown, found = self._matcher.push(text)
            text = self._matcher.rest
            if self._inside:
                self._text.append(shown)
            elif shown:
                out.append(shown)
            if found and self._inside and self._in_value():
                self._text.append(END)
                self._matcher = StopMatcher([END])
            elif found:
                out += self._called() if self._inside else []
                self._inside = not self._inside
                self._matcher = StopMatcher([END if self._inside else BEGIN])
        return out

    def finish(self) -> list[Piece]:
        rest = self._matcher.flush()
        if not self._inside:
            return [rest] if rest else []
        self._text.append(rest)
        return self._called()

    def _in_value(self) -> bool:
        """Whether the end tag just read is inside a value, as it may be in JSON."""
        new, self._seen = "".join(self._text[self._seen :]), len(self._text)
        begin, end = new.rfind("<parameter="), max(map(new.rfind, ("</parameter>", "</function>\n")))
        self._open = begin > end or (self._open and begin == end)
        return self._open

    def _called(self) -> list[Piece]:
        text, self._text, self._seen, self._open = "".join(self._text), [], 0, False
        found = _FUNCTION.fullmatch(text)
        if found is None:
            return [f"{BEGIN}{text}{END}"]
        name = found[1].strip()
        values = self._values.get(name) or Values(Tool(name, parameters=ANY_OBJECT))
        texts = _parameters(found[2])
        arguments = ", ".join(f"{quoted(key)}: {values.written(key, texts[key])}" for key in texts)
        piece = CallPiece(self._count, call_id(), name, f"{{{arguments}}}")
        self._count += 1
        return [piece]


def _parameters(text: str) -> dict[str, str]:
    """The texts between tags; an end tag inside JSON does not count."""
    found: dict[str, str] = {}
    at = 0
    while begin := _BEGIN.search(text, at):
        at = begin.end()
        if nested := _NESTED.match(text, at):
            with suppress(ValueError, RecursionError):
                at = _DECODER.raw_decode(text, nested.end())[1]
        if (end := _END.search(text, at)) is None:
            break
        found[begin[1]], at = text[begin.end() : end.start()], end.end()
    return found


QWEN3_XML = Qwen3Xml()
