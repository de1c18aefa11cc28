"""`/v1/responses/compact`: a long conversation as the user's messages and a summary, which the model itself writes.

The summary is an item `compaction`. Its `encrypted_content` is in fact the text in base64: clients send it back, and
may read it.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from typing import Any

from mlcpipe.runtime.text.tokenizer import Tokenizer
from mlcpipe.server.errors import ApiError

_MARK = "mlcpipe:"
_TASK = """\
You write notes that replace a conversation which became too long. Whoever continues it reads your notes instead. Keep \
what the user wants, what was decided, facts, names, paths and numbers that still matter, what was done and its \
results, and what remains to be done. Do not answer the conversation, and do not greet."""
_ASK = "Here is the conversation.\n\n{}\n\nNow write the notes."
_BEGUN = "Notes about the conversation so far:\n\n"
_SAID = "Earlier messages of mine:\n\n"
MAX_SUMMARY = 1024  # tokens, unless the request says another number


def asked(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], room: int) -> list[dict[str, Any]]:
    """The messages that ask for a summary of others, of which the last `room` tokens are read."""
    text = "\n\n".join(line for message in messages if (line := _line(message)))
    text = text[-tokenizer.most_chars :]
    ids = tokenizer.literal.plain_ids(text)
    if len(ids) > room:
        text = tokenizer.decode(ids[-room:], skip_special_tokens=False)
    return [{"role": "system", "content": _TASK}, {"role": "user", "content": _ASK.format(text)}]


def sealed(summary: str) -> str:
    """A summary as `encrypted_content`."""
    return _MARK + base64.b64encode(summary.encode()).decode()


def opened(item: Mapping[str, Any], where: str) -> str:
    """The summary of an item. Raises ApiError for one of another server."""
    content = item.get("encrypted_content")
    if isinstance(content, str) and content.startswith(_MARK):
        try:
            return base64.b64decode(content[len(_MARK) :], validate=True).decode()
        except (binascii.Error, ValueError):
            pass
    message = f"{where}.encrypted_content: expected what /v1/responses/compact of this server gave"
    raise ApiError(400, message, param=f"{where}.encrypted_content")


def kept_messages(items: Sequence[dict[str, Any]], most_chars: int) -> list[dict[str, Any]]:
    """The user's own messages among items, the last ones that have at most so many characters together."""
    kept: list[dict[str, Any]] = []
    for item in reversed(items):
        if item.get("type") == "message" and item.get("role") == "user":
            most_chars -= len(json.dumps(item.get("content")))
            if most_chars < 0:
                break
            kept.append(item)
    return kept[::-1]


def before_next(summary: str, said: Sequence[str]) -> str:
    """What stands before the next message of the user: a summary, and messages that came before it."""
    earlier = f"{_SAID}{chr(10).join(said)}\n\n" if said else ""
    return f"{earlier}{_BEGUN}{summary}"


def _line(message: Mapping[str, Any]) -> str:
    """A message as text, with its calls; "" for one without."""
    parts = [text_in_parts(message.get("content"))]
    for call in message.get("tool_calls") or ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            parts.append(f"calls {function.get('name')} with {function.get('arguments')}")
    text = "\n".join(part for part in parts if part)
    return f"{message.get('role')}: {text}" if text else ""


def text_in_parts(content: Any) -> str:
    """The texts of a content, with a word for each picture."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else ""
    texts = [part.get("text", "[picture]") for part in content if isinstance(part, Mapping)]
    return "\n".join(text for text in texts if isinstance(text, str))
