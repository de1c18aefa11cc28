"""Mistral 7B v0.3, Nemo and others: `[TOOL_CALLS] [{"name": …, "arguments": {…}}, …]`; ids have nine characters.

Source: the chat template of mistralai/Mistral-7B-Instruct-v0.3. The later form `[TOOL_CALLS]name[ARGS]{…}` is not read.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

from mlcpipe.runtime.serving.grammar import GrammarSource
from mlcpipe.runtime.tool_formats.json_call import JsonCallParser
from mlcpipe.runtime.tool_formats.style import (
    TEXT,
    Literal,
    Messages,
    Style,
    Tool,
    ToolParser,
    call_id,
    json_calls,
    to_template,
)

BEGIN = "[TOOL_CALLS]"


class Mistral(Style):
    """Calls in one list."""

    name = "mistral"
    shown: Collection[str] = (BEGIN,)

    def detect(self, template: str) -> bool:
        """Whether the template writes calls as a list."""
        return BEGIN in template and "[ARGS]" not in template

    def prepare(self, messages: Messages, tools: Sequence[Tool]) -> tuple[Messages, dict[str, Any]]:
        """The template writes the tools; it requires ids of nine characters."""
        return [_with_short_ids(message) for message in messages], to_template(messages, tools)[1]

    def grammar(self, tools: Sequence[Tool], literal: Literal, *, forced: bool, parallel: bool) -> GrammarSource | None:
        """From the marker on, a list of calls."""
        calls, begin = json_calls(tools), literal(BEGIN)
        one = calls.one
        more = f'(", " {one})*' if parallel else ""
        body = f'" "? "[" {one} {more} "]"'
        if forced:
            text = f"start: {begin} {body}\n"
        elif begin.startswith("<"):
            text = f"start: TEXT ({begin} {body})?\n{TEXT}"
        else:
            text = f"start: head {body} | TEXT\nhead[lazy]: TEXT {begin}\n{TEXT}"
        return GrammarSource("lark", text + calls.rules, calls.parts, calls.lark_parts)

    def parser(self, tools: Sequence[Tool]) -> ToolParser:
        """The parser of the list."""
        return JsonCallParser([BEGIN], between=" \t\r\n,[]", new_id=partial(call_id, 9, ""))


def _with_short_ids(message: dict[str, Any]) -> dict[str, Any]:
    changed = dict(message)
    if isinstance(message.get("tool_call_id"), str):
        changed["tool_call_id"] = _short(message["tool_call_id"])
    if message.get("tool_calls"):
        changed["tool_calls"] = [{**call, "id": _short(str(call.get("id", "")))} for call in message["tool_calls"]]
    return changed


def _short(text: str) -> str:
    kept = "".join(char for char in text if char.isascii() and char.isalnum())
    return kept[-9:].rjust(9, "0")


MISTRAL = Mistral()
