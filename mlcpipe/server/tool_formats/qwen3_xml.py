"""Qwen3-Coder: `<tool_call><function=name><parameter=key>value</parameter>…</function></tool_call>`.

A value is text between newlines; the tool's schema says which values are JSON. Source: the chat template of
Qwen/Qwen3-Coder-30B-A3B-Instruct.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from mlcpipe.runtime.serving.grammar import GrammarSource
from mlcpipe.runtime.text.streaming import StopMatcher
from mlcpipe.server.tool_formats.style import (
    CallPiece,
    Literal,
    Messages,
    Piece,
    Style,
    Tool,
    ToolParser,
    call_id,
    to_template,
)

BEGIN, END = "<tool_call>", "</tool_call>"
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)(?:</function>\s*|$)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


class Qwen3Xml(Style):
    """Calls in tags of names and values."""

    name = "qwen3_xml"
    shown: Collection[str] = (BEGIN, END)

    def detect(self, template: str) -> bool:
        """Whether the template writes names in tags."""
        return BEGIN in template and "<function=" in template

    def prepare(self, messages: Messages, tools: Sequence[Tool]) -> tuple[Messages, dict[str, Any]]:
        """The template writes the tools."""
        return to_template(messages, tools)

    def grammar(self, tools: Sequence[Tool], literal: Literal, *, forced: bool, parallel: bool) -> GrammarSource | None:
        """Names of tools and of their parameters; values are free text. None unless forced."""
        if not forced:
            return None
        more = '("\\n"? call)*' if parallel else ""
        rules = [f"start: call {more}", f"call: {literal(BEGIN)} ({' | '.join(f'f{i}' for i in range(len(tools)))})"]
        for index, tool in enumerate(tools):
            keys = [str(key) for key in (tool.parameters.get("properties") or ())]
            values = " | ".join(json.dumps(f"<parameter={key}>\n") + " value" for key in keys)
            begin, end = json.dumps(f"\n<function={tool.name}>\n"), json.dumps("</function>\n")
            rules.append(f"f{index}: {begin} {f'({values})*' if keys else ''} {end} {literal(END)}")
        rules.append("value[lazy]: /(.|\\n)*\\n<\\/parameter>\\n/")
        return GrammarSource("lark", "\n".join(rules) + "\n")

    def parser(self, tools: Sequence[Tool]) -> ToolParser:
        """For the tags; a call comes in one piece at its end."""
        return _XmlParser(tools)


class _XmlParser:
    inside = False

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._texts = {tool.name: _text_parameters(tool.parameters) for tool in tools}
        self._matcher = StopMatcher([BEGIN])
        self._inside = False
        self._count = 0
        self._text: list[str] = []

    def push(self, text: str) -> list[Piece]:
        out: list[Piece] = []
        while text:
            shown, found = self._matcher.push(text)
            text = self._matcher.rest
            if self._inside:
                self._text.append(shown)
            elif shown:
                out.append(shown)
            if found:
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

    def _called(self) -> list[Piece]:
        text, self._text = "".join(self._text), []
        found = _FUNCTION.fullmatch(text)
        if found is None:
            return [f"{BEGIN}{text}{END}"]
        name = found[1].strip()
        texts = self._texts.get(name, ())
        arguments = {key: text if key in texts else _value(text) for key, text in _PARAMETER.findall(found[2])}
        piece = CallPiece(self._count, call_id(), name, json.dumps(arguments, ensure_ascii=False))
        self._count += 1
        return [piece]


def _text_parameters(schema: Mapping[str, Any]) -> set[str]:
    properties = schema.get("properties")
    pairs = properties.items() if isinstance(properties, Mapping) else ()
    return {key for key, value in pairs if isinstance(value, Mapping) and value.get("type") == "string"}


def _value(text: str) -> Any:
    """Numbers, true, false, null, lists and objects are JSON; everything else is text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if not isinstance(value, str) else text


QWEN3_XML = Qwen3Xml()
