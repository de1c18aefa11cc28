"""For templates without tools: the system message describes them, and calls are written as in Hermes."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

from mlcpipe.runtime.tool_formats.hermes import BEGIN, END, Hermes
from mlcpipe.runtime.tool_formats.style import Messages, Tool

_INTRODUCTION = (
    "You may call functions. Here they are, each as JSON with its parameters:\n{tools}\n"
    'To call one, write {begin}{{"name": "…", "arguments": {{…}}}}{end} and nothing after it. '
    "Its result comes in the next message."
)


class Generic(Hermes):
    """Tools as text."""

    name = "generic"
    shown: Collection[str] = ()

    def detect(self, template: str) -> bool:
        """Always."""
        return True

    def prepare(self, messages: Messages, tools: Sequence[Tool]) -> tuple[Messages, dict[str, Any]]:
        """Messages without fields for tools: calls and results are text in them."""
        plain = [_as_text(message) for message in messages]
        if not tools:
            return plain, {}
        listed = "\n".join(json.dumps(tool.described()["function"], ensure_ascii=False) for tool in tools)
        text = _INTRODUCTION.format(tools=listed, begin=BEGIN, end=END)
        if plain[0]["role"] == "system":
            return [{**plain[0], "content": f"{_text(plain[0])}\n\n{text}"}, *plain[1:]], {}
        return [{"role": "system", "content": text}, *plain], {}


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    content = _text(message)
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = [f"{BEGIN}{json.dumps(call['function'], ensure_ascii=False)}{END}" for call in calls]
    return {"role": "assistant", "content": "\n".join([content, *written] if content else written)}


def _text(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content if "text" in part)


GENERIC = Generic()
