"""A chat as JSON, written atomically by `/save` and checked by `/load`.

It is a file of its own, or part of one with keys and values (`mlcpipe/runtime/chat_file.py`).

{"format": "mlcpipe-chat", "version": 1, "model": "…", "settings": {…},
 "messages": [{"role": …, "content": …}]}; answers with thoughts have "reasoning_content" too, and questions about
pictures and videos their paths: "pictures", "videos"
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, FailFast

from mlcpipe.cli.chat.settings import Settings
from mlcpipe.errors import UsageError
from mlcpipe.support.atomic import atomic_write
from mlcpipe.support.json_files import OnlyKnown, read_json_object, validated

MAX_BYTES = 16 << 20  # a million tokens take a quarter of this
_WHAT = "the saved chat"

Message = dict[str, Any]


@dataclass(frozen=True)
class Transcript:
    """The content of a saved chat: an optional system message first, then user and assistant alternate."""

    messages: tuple[Message, ...]
    settings: Settings
    model: str = ""

    def content(self) -> dict[str, Any]:
        """The JSON object."""
        return {
            "format": "mlcpipe-chat",
            "version": 1,
            "model": self.model,
            "settings": self.settings.values(),
            "messages": list(self.messages),
        }


class _Message(OnlyKnown, BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    role: Literal["system", "user", "assistant"]
    content: str
    reasoning_content: str | None = None
    pictures: Annotated[list[str] | None, FailFast()] = None
    videos: Annotated[list[str] | None, FailFast()] = None


def _alternating(messages: list[_Message]) -> list[_Message]:
    roles = [message.role for message in messages]
    turns = roles[1:] if roles[:1] == ["system"] else roles
    if turns != ["user", "assistant"] * (len(turns) // 2):
        raise ValueError("an optional system message, then pairs of a user message and an answer")
    return messages


class _SavedChat(BaseModel):
    model_config = ConfigDict(strict=True)

    format: Literal["mlcpipe-chat"]
    version: Literal[1]
    model: str = ""
    settings: dict[str, Any] = {}
    messages: Annotated[list[_Message], FailFast(), AfterValidator(_alternating)]


def save_transcript(path: Path, transcript: Transcript) -> None:
    """Write the chat. Raises UsageError if `path` holds something other than a chat or cannot be written."""
    if path.exists():
        try:
            load_transcript(path)
        except UsageError:
            raise UsageError(
                "/save does not overwrite this file",
                where=path,
                expected="a new file or a saved chat",
                next_step="give another name",
            ) from None
    text = json.dumps(transcript.content(), ensure_ascii=False, indent=1) + "\n"
    try:
        atomic_write(path, text.encode("utf-8", "replace"))
    except OSError as error:
        raise UsageError("the chat cannot be saved", where=path, found=error.strerror) from error


def load_transcript(path: Path) -> Transcript:
    """Read and check a saved chat. Raises UsageError naming the defect."""
    content = read_json_object(path, limit=MAX_BYTES, error=UsageError, what="saved chat", max_values=MAX_BYTES // 8)
    return transcript_of(content, path)


def transcript_of(content: dict[str, Any] | None, path: Path) -> Transcript:
    """The chat in a file's JSON, None if it has none. Raises UsageError naming the defect."""
    chat = validated(_SavedChat, content, what=_WHAT, where=path, error=UsageError)
    try:
        settings = Settings().with_values(chat.settings)
    except UsageError as error:
        raise UsageError(f"{_WHAT} has a bad setting: {error}", where=path) from None
    return Transcript(tuple(message.model_dump(exclude_none=True) for message in chat.messages), settings, chat.model)


def well_formed(text: str) -> str:
    """`text` with lone surrogates (undecodable bytes of an argument) replaced: tokenizers take only UTF-8."""
    return text.encode("utf-8", "replace").decode("utf-8")
