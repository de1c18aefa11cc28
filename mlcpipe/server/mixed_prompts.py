"""Prompts as llama-server takes them: a text, tokens, a list that mixes both, or an object with a text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlcpipe.runtime.text.tokenizer import Tokenizer
from mlcpipe.server.bodies import MAX_ITEMS
from mlcpipe.server.errors import ApiError

Prompts = str | list[str | int | list[str | int] | dict[str, Any]] | dict[str, Any]
"""The type of a field with one or several of them."""


def listed_prompts(given: Any) -> list[Any]:
    """Each prompt of a field: a list is several where it has lists or objects, or has texts alone; else it is one."""
    several = isinstance(given, list) and (
        any(isinstance(one, (list, dict)) for one in given) or all(isinstance(one, str) for one in given)
    )
    return given if several else [given]


def check_texts(tokenizer: Tokenizer, parts: Sequence[Any], where: str, *, chars: bool = True) -> None:
    """Raises ApiError for more texts than are encoded one by one, LongTextError for too many `chars` together."""
    texts = [len(part) for part in parts if isinstance(part, str)]
    if len(texts) > MAX_ITEMS:
        raise ApiError(400, f"{where}: expected at most {MAX_ITEMS} texts, found {len(texts)}", param=where)
    if chars:
        tokenizer.check_length(sum(texts))


def mixed_ids(tokenizer: Tokenizer, given: Any, where: str, *, around: bool = True) -> list[int]:
    """The tokens of a text, of tokens, or of a list of both; `around` adds those around a text. Raises ApiError."""
    if isinstance(given, dict):
        given = text_in(given, where)
    parts = given if isinstance(given, list) else [given]
    check_texts(tokenizer, parts, where)
    ids: list[int] = []
    for index, part in enumerate(parts):
        if isinstance(part, str):
            ids += tokenizer.encode(part, add_special_tokens=around and index == 0)
        elif type(part) is int and isinstance(given, list):
            ids.append(part)
        else:
            raise ApiError(400, f"{where}: expected texts and token ids, found {type(part).__name__}", param=where)
    return ids


def text_in(given: dict[str, Any], where: str) -> str:
    """The text of an object: its `prompt_string`, or the texts of its `content`. Raises ApiError."""
    if given.get("multimodal_data"):
        raise ApiError(400, f"{where}.multimodal_data: not offered here; send text only", param=where)
    content, text = given.get("content"), given.get("prompt_string")
    if text is None and isinstance(content, list) and 0 < len(content) <= MAX_ITEMS:
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            if kind != "text" or not isinstance(part.get("text"), str):
                raise ApiError(400, f"{where}.content: expected text, found {str(kind)[:40]!r}", param=where)
        text = "".join(part["text"] for part in content)
    if not isinstance(text, str):
        raise ApiError(400, f"{where}: expected prompt_string, or content as a list of texts", param=where)
    return text
