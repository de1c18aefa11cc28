"""Items of a request to `/v1/responses` as messages of the chat API."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from mlcpipe.server.compaction import before_next, opened, text_in_parts
from mlcpipe.server.errors import ApiError
from mlcpipe.server.message_content import PlacedMessage, picture

_CALLS = ("function_call", "custom_tool_call")
_RESULTS = ("function_call_output", "custom_tool_call_output")
MAX_COMPACTIONS = 32  # of an input: each one copies what is before it
_PREFIX = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
    "compaction": "cmp",
}


def items_of(given: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items of an input, each with an id."""
    if isinstance(given, str):
        given = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": given}]}]
    made = []
    for item in given:
        kind = item.get("type", "message" if "role" in item else None)
        prefix = _PREFIX.get(str(kind), "item")
        made.append({"id": f"{prefix}_{secrets.token_hex(16)}", "type": kind, **item})
    return made


def messages_of(given: str | list[dict[str, Any]], earlier: int = 0) -> list[dict[str, Any]]:
    """The messages of an input, after so many items of `earlier` requests.

    Calls that follow each other, and the text before them, are one message of the assistant. Items of tools that this
    server does not have are skipped. Raises ApiError for pictures that are stored elsewhere, and compactions that are
    another server's, or too many.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    out: list[dict[str, Any]] = []
    reasoning = notes = ""
    if sum(item.get("type") == "compaction" for item in given) > MAX_COMPACTIONS:
        words = f"input: expected at most {MAX_COMPACTIONS} compactions; send the last one and what follows it"
        raise ApiError(400, words, param="input")
    for index, item in enumerate(given):
        kind = item.get("type", "message" if "role" in item else None)
        where = f"input[{index - earlier}]" if index >= earlier else f"earlier[{index}]"
        if kind == "compaction":
            notes = _noted(out, opened(item, where), notes)
            continue
        if notes and kind in ("message", *_CALLS, *_RESULTS):
            if kind == "message" and item.get("role") == "user":
                item = {**item, "content": _after(notes, item.get("content"))}
            else:
                out.append({"role": "user", "content": notes})
            notes = ""
        if kind == "message":
            content = _content(item.get("content"), f"{where}.content")
            message = PlacedMessage({"role": item.get("role"), "content": content}, where)
            if reasoning and message["role"] == "assistant":
                message["reasoning_content"], reasoning = reasoning, ""
            out.append(message)
        elif kind in _CALLS:
            said = out[-1] if out and out[-1]["role"] == "assistant" else None
            if said is None:
                said = PlacedMessage({"role": "assistant", "content": None}, where)
                if reasoning:
                    said["reasoning_content"], reasoning = reasoning, ""
                out.append(said)
            if not isinstance(item.get("name"), str):
                raise ApiError(400, f"{where}.name: expected the name of a function", param=f"{where}.name")
            said.setdefault("tool_calls", []).append(_call(item))
        elif kind in _RESULTS:
            content = _content(item.get("output"), f"{where}.output")
            result = {"role": "tool", "tool_call_id": str(item.get("call_id")), "content": content}
            out.append(PlacedMessage(result, where, f"{where}.output"))
        elif kind == "reasoning":
            reasoning = _reasoning(item)
    return [*out, {"role": "user", "content": notes}] if notes else out


def _call(item: Mapping[str, Any]) -> dict[str, Any]:
    """A call in the form of the chat API."""
    if item["type"] == "custom_tool_call":
        custom = {"name": item.get("name"), "input": item.get("input")}
        return {"id": item.get("call_id"), "type": "custom", "custom": custom}
    function = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
    return {"id": item.get("call_id"), "function": function}


def _noted(out: list[dict[str, Any]], summary: str, notes: str) -> str:
    """What stands before the next message of the user: a summary, earlier `notes`, and the messages of the user before
    it, which leave: chat templates want others in turn.
    """
    said = [notes] if notes else []
    while out and out[-1]["role"] == "user":
        said.insert(0, text_in_parts(out.pop()["content"]))
    return before_next(summary, said)


def _after(notes: str, content: Any) -> Any:
    """A content with notes before it."""
    if isinstance(content, list):
        return [{"type": "input_text", "text": notes}, *content]
    return f"{notes}\n\n{content}" if isinstance(content, str) else content


def _content(content: Any, where: str) -> Any:
    """A content with its pictures in the form of the chat API. Raises ApiError for those that are stored elsewhere."""
    if not isinstance(content, list):
        return content
    return [_part(part, f"{where}[{at}]") for at, part in enumerate(content)]


def _part(part: Any, where: str) -> Any:
    if not isinstance(part, Mapping) or part.get("type") != "input_image":
        return part
    if part.get("image_url") is None:
        message = f"{where}: expected image_url; files are not stored here"
        raise ApiError(400, message, param=where, code="unsupported_parameter")
    return picture(part["image_url"], part.get("detail"), where=f"{where}.image_url")


def _reasoning(item: Mapping[str, Any]) -> str:
    parts = item.get("content") or item.get("summary")
    texts = [part.get("text") for part in parts if isinstance(part, Mapping)] if isinstance(parts, list) else []
    return "\n".join(text for text in texts if isinstance(text, str))
