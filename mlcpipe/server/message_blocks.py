"""Blocks of Anthropic's messages as messages of the OpenAI API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlcpipe.server.errors import ApiError
from mlcpipe.server.message_content import is_picture, listed, picture, text_of

_HOSTED_RESULTS = ("web_search_tool_result", "web_fetch_tool_result")
_SKIPPED = "redacted_thinking"
_SHOWN = ("title", "url")  # of a hosted tool's result: the rest is encrypted


def messages_of(message: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """One message: results of tools become messages of their own. Raises ApiError for other content."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise ApiError(400, f"{where}.role: expected user or assistant", param=f"{where}.role")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    blocks = listed(content, f"{where}.content")
    if role == "assistant":
        return _said(blocks, where)
    results, said = [], []
    for index, block in enumerate(blocks):
        place = f"{where}.content[{index}]"
        if _kind(block) == "tool_result":
            results.append(_result(block.get("tool_use_id"), _returned(block.get("content"), f"{place}.content")))
        else:
            said.append(_part(block, place))
    return [*results, *([{"role": role, "content": _joined(said)}] if said or not results else [])]


def _part(block: Any, where: str) -> dict[str, Any]:
    """A block as a part of a message of the OpenAI API: a picture, or text. Raises ApiError."""
    if _kind(block) != "image":
        return {"type": "text", "text": _text([block], where)}
    source = block.get("source")
    kind = _kind(source)
    if kind == "base64":
        data = f"data:{source.get('media_type')};base64,{source.get('data')}"
        return picture(data, where=f"{where}.source")
    if kind == "url":
        return picture(source.get("url"), where=f"{where}.source")
    message = f"{where}.source: expected an image in base64, or its url, found {str(kind)[:40]!r}; send its data"
    raise ApiError(400, message, param=f"{where}.source")


def _joined(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """One text, or with pictures among them the parts in their order."""
    return parts if any(map(is_picture, parts)) else "\n".join(part["text"] for part in parts)


def _returned(content: Any, where: str) -> str | list[dict[str, Any]]:
    """What a tool returned. Raises ApiError."""
    if content is None or isinstance(content, str):
        return content or ""
    return _joined([_part(block, f"{where}[{at}]") for at, block in enumerate(listed(content, where))])


def _said(blocks: Any, where: str) -> list[dict[str, Any]]:
    """An answer; one with a tool that its own server ran is several, with the results between them."""
    out: list[dict[str, Any]] = []
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []

    def end() -> None:
        said: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
        said |= {"tool_calls": calls.copy()} if calls else {}
        out.append(said | ({"reasoning_content": "\n".join(thoughts)} if thoughts else {}))
        for part in (texts, calls, thoughts):
            part.clear()

    for index, block in enumerate(blocks):
        kind, place = _kind(block), f"{where}.content[{index}]"
        if kind in ("tool_use", "server_tool_use"):
            function = {"name": block.get("name"), "arguments": block.get("input") or {}}
            calls.append({"id": str(block.get("id")), "type": "function", "function": function})
        elif kind in _HOSTED_RESULTS:
            end()
            out.append(_result(block.get("tool_use_id"), _found(block.get("content"), f"{place}.content")))
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking") or ""))
        elif kind != _SKIPPED:
            texts.append(_text([block], place))
    if texts or calls or thoughts or not out:
        end()
    return out


def _kind(block: Any) -> Any:
    return block.get("type") if isinstance(block, Mapping) else None


def _result(call: Any, content: str | list[dict[str, Any]]) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": str(call), "content": content}


def _text(content: Any, where: str) -> str:
    """The text of a string, or of a list of texts, documents and results of a search. Raises ApiError."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for index, block in enumerate(listed(content, where)):
        place = f"{where}[{index}]"
        if _kind(block) == "document":
            texts.append(_document(block, place))
        elif _kind(block) == "search_result":
            _check_citations(block, place)
            texts.append(_titled(block, ("title", "source"), text_of(block.get("content"), f"{place}.content")))
        else:
            texts.append(text_of([block], where))
    return "\n".join(texts)


def _document(block: Mapping[str, Any], where: str) -> str:
    """A document of text, or of blocks of text."""
    _check_citations(block, where)
    source = block.get("source")
    kind = _kind(source)
    text = None
    if isinstance(source, Mapping) and kind == "text":
        text = source.get("data")
    elif isinstance(source, Mapping) and kind == "content":
        text = text_of(source.get("content"), f"{where}.source.content")
    if not isinstance(text, str):
        message = f"{where}.source: expected a document of text, found {str(kind)[:40]!r}; send its text"
        raise ApiError(400, message, param=f"{where}.source")
    return _titled(block, ("title", "context"), text)


def _titled(block: Mapping[str, Any], names: tuple[str, ...], text: str) -> str:
    """A text under lines about it."""
    about = [str(block[name]) for name in names if block.get(name)]
    return "\n".join([*about, text])


def _check_citations(block: Mapping[str, Any], where: str) -> None:
    citations = block.get("citations")
    if isinstance(citations, Mapping) and citations.get("enabled"):
        message = f"{where}.citations: answers cite nothing here; leave it out"
        raise ApiError(400, message, param=f"{where}.citations", code="unsupported_parameter")


def _found(content: Any, where: str) -> str:
    """What a tool of another server found: titles and addresses, or its error."""
    if isinstance(content, Mapping):
        return str(content.get("error_code") or content.get("url") or content.get("type"))
    lines = [" ".join(str(one[name]) for name in _SHOWN if one.get(name))
             for one in listed(content, where) if isinstance(one, Mapping)]  # fmt: skip
    return "\n".join(lines)
