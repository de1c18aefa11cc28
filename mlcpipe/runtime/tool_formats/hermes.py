"""Hermes 2 Pro, Qwen 2.5 and 3 and others: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, one after another.

Source: the chat templates of NousResearch/Hermes-2-Pro-Llama-3-8B and Qwen/Qwen3-0.6B.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from mlcpipe.runtime.serving.grammar import GrammarSource
from mlcpipe.runtime.tool_formats.json_call import JsonCallParser
from mlcpipe.runtime.tool_formats.style import (
    Literal,
    Messages,
    Style,
    Tool,
    ToolParser,
    in_tags,
    json_calls,
    to_template,
)

BEGIN, END = "<tool_call>", "</tool_call>"


class Hermes(Style):
    """Calls in their own tags."""

    name = "hermes"
    shown: Collection[str] = (BEGIN, END)

    def detect(self, template: str) -> bool:
        """Whether the template writes calls in these tags."""
        return BEGIN in template and "tools" in template

    def prepare(self, messages: Messages, tools: Sequence[Tool]) -> tuple[Messages, dict[str, Any]]:
        """The template writes the tools."""
        return to_template(messages, tools)

    def grammar(self, tools: Sequence[Tool], literal: Literal, *, forced: bool, parallel: bool) -> GrammarSource | None:
        """From the tag on, the JSON of a tool; before it any text, unless forced."""
        calls = json_calls(tools)
        rest = f'"\\n"? {calls.one} "\\n"? {literal(END)}'
        text = in_tags(literal(BEGIN), rest, forced=forced, parallel=parallel)
        return GrammarSource("lark", text + calls.rules, calls.parts, calls.lark_parts)

    def parser(self, tools: Sequence[Tool]) -> ToolParser:
        """The parser of tags."""
        return JsonCallParser([BEGIN], end=END)


HERMES = Hermes()
