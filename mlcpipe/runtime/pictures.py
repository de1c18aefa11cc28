"""Pictures in messages: what a chat template writes for one becomes the tokens and rows that stand for it."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlcpipe.bundle.model_info import VisionInfo
from mlcpipe.errors import TemplateError, UsageError
from mlcpipe.runtime.text.tokenizer import Tokenizer
from mlcpipe.vision.processors.decode import open_image
from mlcpipe.vision.processors.picture import Picture

Message = Mapping[str, Any]
MAX_PICTURES = 256  # of a conversation
_ONE = threading.Lock()  # picture is decoded at a time: that takes much more memory than what remains of it
MARK = {"type": "image"}  # what a template sees of a picture


def marked(messages: Sequence[Message]) -> tuple[Sequence[Message], list[tuple[str, Any]]]:
    """The messages with `MARK` for pictures, and each picture's place and what it is read from.

    A picture is a part {"type": "image", "image": a path, bytes, a PIL.Image or an array} of a message; `where` in it
    is its place for people, if that is not its place here. Messages that are no objects are left to others' checks.
    Raises UsageError for a part without the picture, and for too many.
    """
    sources: list[tuple[str, Any]] = []

    def part_of(part: Any, where: str) -> Any:
        if not isinstance(part, Mapping) or part.get("type") != MARK["type"]:
            return part
        if part.get("image") is None:
            raise UsageError(where, expected='{"type": "image", "image": …}', found="no image")
        sources.append((str(part.get("where", where)), part["image"]))
        return MARK

    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
        return messages, []
    made = []
    for index, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, (list, tuple)):
            where = f"messages[{index}].content"
            message = {**message, "content": [part_of(part, f"{where}[{at}]") for at, part in enumerate(content)]}
        made.append(message)
    if len(sources) > MAX_PICTURES:
        raise UsageError("pictures of a conversation", expected=f"at most {MAX_PICTURES}", found=len(sources))
    return (made, sources) if sources else (messages, [])


def read_pictures(sources: Sequence[tuple[str, Any]], info: VisionInfo | None, room: int) -> list[Picture]:
    """The pictures, ready for a model's tower, which stand for at most `room` tokens together.

    Raises UsageError for a model that sees none, for what is no picture, and for more tokens.
    """
    if sources and info is None:
        raise UsageError(
            "the model sees no pictures", where=sources[0][0], expected="text", found="a picture",
            next_step="send text only, or take a model of docs/families.md that sees, compiled for a CPU",
        )  # fmt: skip
    pictures: list[Picture] = []
    for where, source in sources:
        assert info is not None
        processor = importlib.import_module(f"mlcpipe.vision.processors.{info.processor}")
        prepare = processor.prepare if len(sources) == 1 else getattr(processor, "prepare_among", processor.prepare)
        with _ONE:
            picture = prepare(open_image(source, where), info)
        pictures.append(picture)
        room -= picture.rows
        if room < 0:
            raise UsageError(
                "the context is full", where=where, expected="pictures of fewer rows", found=picture.rows - room,
                next_step="send fewer pictures, start a new conversation, or load with a larger context",
            )  # fmt: skip
    return pictures


def completion(sources: Sequence[tuple[str, Any]], info: VisionInfo | None) -> Callable[[str], str]:
    """What puts a picture's texts around its token in a rendered prompt, where there are pictures and such texts."""
    if not sources or info is None or not any(info.around):
        return str
    whole, name = f"{info.around[0]}{info.name}{info.around[1]}", info.name
    return lambda text: text.replace(name, whole)


def with_rows(tokens: list[int], pictures: Sequence[Picture], tokenizer: Tokenizer) -> list[int]:
    """A prompt's tokens, where the template wrote a picture's token: its texts, and an id for each of its rows.

    Raises TemplateError where it wrote another number of them.
    """
    if not pictures:
        return tokens
    mark = pictures[0].info.token
    if tokens.count(mark) != len(pictures):
        raise TemplateError(
            "the chat template writes another number of pictures", expected=len(pictures), found=tokens.count(mark),
            next_step="give pictures in messages of the user, and no control tokens",
        )  # fmt: skip
    made: list[int] = []
    left = iter(pictures)
    for token in tokens:
        if token == mark:
            made += _tokens_of(next(left), tokenizer)
        else:
            made.append(token)
    return made


def _tokens_of(picture: Picture, tokenizer: Tokenizer) -> list[int]:
    made: list[int] = []
    row = 0
    for part in picture.layout:
        if isinstance(part, int):
            made += map(picture.id_of, range(row, row + part))
            row += part
        else:
            made += tokenizer.encode(part)
    return made
