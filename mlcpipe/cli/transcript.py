"""A chat on disk: JSON that `/save` writes whole or not at all and `/load` checks before it is used.

{"format": "mlcpipe-chat", "version": 1, "model": "…", "settings": {…},
 "messages": [{"role": …, "content": …}]}
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from mlcpipe.atomic import atomic_write
from mlcpipe.cli.settings import Settings
from mlcpipe.errors import UsageError

FORMAT, VERSION = "mlcpipe-chat", 1
MAX_BYTES = 64 << 20

Message = dict[str, str]


@dataclass(frozen=True)
class Transcript:
    """What a saved chat holds: an optional system message first, then user and assistant by turns."""

    messages: tuple[Message, ...]
    settings: Settings
    model: str = ""


def save_transcript(path: Path, transcript: Transcript) -> None:
    """Write the chat. Raises UsageError if `path` holds something else than a chat or cannot be written."""
    if path.exists() and not _is_transcript(path):
        raise UsageError(
            "/save does not overwrite this file",
            where=path,
            expected="a new file or a saved chat",
            next_step="give another name",
        )
    content = {
        "format": FORMAT,
        "version": VERSION,
        "model": transcript.model,
        "settings": transcript.settings.values(),
        "messages": list(transcript.messages),
    }
    text = json.dumps(content, ensure_ascii=False, indent=1) + "\n"
    try:
        atomic_write(path, text.encode("utf-8", "replace"))
    except OSError as error:
        raise UsageError("the chat cannot be saved", where=path, found=error.strerror) from error


def load_transcript(path: Path) -> Transcript:
    """Read and check a saved chat. Raises UsageError that says what is wrong with it."""
    content = _read_json(path)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UsageError("this is not a saved chat", where=path, expected=f'"format": "{FORMAT}"')
    if content.get("version") != VERSION:
        raise UsageError(
            "the saved chat has another version",
            where=path,
            expected=VERSION,
            found=repr(content.get("version"))[:60],
        )
    settings = content.get("settings", {})
    if not isinstance(settings, dict) or not all(isinstance(key, str) for key in settings):
        raise UsageError("the settings of the saved chat are not a JSON object", where=path)
    try:
        checked = Settings().with_values(settings)
    except UsageError as error:
        raise UsageError(f"the saved chat has a bad setting: {error}", where=path) from None
    model = content.get("model", "")
    if not isinstance(model, str):
        raise UsageError("the model of the saved chat is not a string", where=path)
    return Transcript(_messages(path, content.get("messages")), checked, model)


def well_formed(text: str) -> str:
    """`text` with lone surrogates (undecodable bytes of an argument) replaced: tokenizers take only UTF-8."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _messages(path: Path, messages: object) -> tuple[Message, ...]:
    if not isinstance(messages, list):
        raise UsageError("the saved chat has no list of messages", where=path)
    turn = 0
    for number, message in enumerate(messages):
        where = f"{path}, message {number}"
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            raise UsageError("a message is broken", where=where, expected='{"role": …, "content": …}')
        if not isinstance(message["content"], str) or well_formed(message["content"]) != message["content"]:
            raise UsageError("the content of a message is not a string of Unicode characters", where=where)
        if number == 0 and message["role"] == "system":
            continue
        expected = ("user", "assistant")[turn % 2]
        if message["role"] != expected:
            raise UsageError(
                "the roles of the messages are out of order",
                where=where,
                expected=expected,
                found=repr(message["role"])[:60],
            )
        turn += 1
    if turn % 2:
        raise UsageError("the saved chat ends with a question", where=path, expected="an answer at the end")
    return tuple(messages)


def _read_json(path: Path) -> object:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        found = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError("the saved chat cannot be read", where=path, found=found) from error
    if len(raw) > MAX_BYTES:
        raise UsageError("the file is too large for a saved chat", where=path, expected=f"{MAX_BYTES} bytes")
    try:
        return json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UsageError("the saved chat is not JSON in UTF-8", where=path, found=str(error)[:80]) from None


def _is_transcript(path: Path) -> bool:
    if not path.is_file():
        return False
    try:
        content = _read_json(path)
    except UsageError:
        return False
    return isinstance(content, dict) and content.get("format") == FORMAT
