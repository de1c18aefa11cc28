"""Pictures and videos in messages: what a chat template writes for them becomes the tokens and rows of a prompt."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from typing import Any

from mlcpipe.bundle.model_info import VisionInfo
from mlcpipe.errors import TemplateError, UsageError
from mlcpipe.runtime.text.tokenizer import Tokenizer
from mlcpipe.vision.processors.decode import open_image
from mlcpipe.vision.processors.picture import Picture
from mlcpipe.vision.processors.video import Video, parts_of

Message = Mapping[str, Any]
MAX_PICTURES = 256  # and videos of a conversation
# One picture, and one video, is decoded at a time: that takes much more memory than what remains of it.
_ONE, _ONE_VIDEO = threading.Lock(), threading.Lock()
MARK = {"type": "image"}  # what a template sees of a picture


def seen(messages: Sequence[Message], info: VisionInfo | None, room: int) -> tuple[Sequence[Message], list[Picture]]:
    """The messages as a template takes them, and the pictures in them, ready for a model's tower, which stand for at
    most `room` tokens together.

    A picture is a part {"type": "image", "image": a path, bytes, a PIL.Image or an array} of a message; `where` in it
    is its place for people, if that is not its place here. A video is {"type": "video", "video": a path, bytes, or a
    list of frames}, where frames may have `times_s`: as many seconds. It becomes texts and pictures. Messages that are
    no objects are left to others' checks. Raises UsageError for a model that sees none, for what is none, and for too
    many.
    """
    plain, sources = marked(messages)
    if not sources:
        return plain, []
    read = read_pictures(sources, info, room)
    left = iter(read)

    def parts(part: Any) -> list[Any]:
        if part is not MARK:
            return [part]
        return [MARK if isinstance(one, Picture) else {"type": "text", "text": one} for one in next(left)]

    made = [
        {**message, "content": [one for part in message["content"] for one in parts(part)]}
        if isinstance(message, Mapping) and isinstance(message.get("content"), list)
        else message
        for message in plain
    ]
    return made, [one for of_source in read for one in of_source if isinstance(one, Picture)]


def marked(messages: Sequence[Message]) -> tuple[Sequence[Message], list[tuple[str, Any]]]:
    """The messages with `MARK` for pictures and videos, and each one's place and what it is read from.

    Raises UsageError for a part without the picture, and for too many.
    """
    sources: list[tuple[str, Any]] = []

    def part_of(part: Any, where: str) -> Any:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in ("image", "video"):
            return part
        if part.get(kind) is None:
            raise UsageError(where, expected=f'{{"type": "{kind}", "{kind}": …}}', found=f"no {kind}")
        source = part[kind] if kind == "image" else Video(part[kind], part.get("times_s"))
        sources.append((str(part.get("where", where)), source))
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


def read_pictures(sources: Sequence[tuple[str, Any]], info: VisionInfo | None, room: int) -> list[list[str | Picture]]:
    """What each source becomes in a prompt: a picture, or of a video texts and pictures. Raises as `seen`."""
    if sources and info is None:
        raise UsageError(
            "the model sees no pictures", where=sources[0][0], expected="text", found="a picture",
            next_step="send text only, or take a model of docs/families.md that sees, compiled for a CPU",
        )  # fmt: skip
    read, rows = list[list[str | Picture]](), 0
    for where, source in sources:
        assert info is not None
        read.append([])
        one_at_a_time = _ONE_VIDEO if isinstance(source, Video) else _ONE
        with one_at_a_time, closing(_parts(source, where, info, len(sources))) as parts:
            for part in parts:
                read[-1].append(part)
                rows += part.rows if isinstance(part, Picture) else 0
                if rows > room:
                    raise UsageError(
                        "the context is full", where=where, expected=f"pictures of at most {room} rows", found=rows,
                        next_step="send fewer pictures, start a new conversation, or load with a larger context",
                    )  # fmt: skip
    return read


def _parts(source: Any, where: str, info: VisionInfo, count: int) -> Generator[str | Picture, None, None]:
    """What one of `count` sources becomes. Raises UsageError."""
    if isinstance(source, Video):
        yield from parts_of(source, where, info)
        return
    processor = importlib.import_module(f"mlcpipe.vision.processors.{info.processor}")
    prepare = processor.prepare if count == 1 else getattr(processor, "prepare_among", processor.prepare)
    yield prepare(open_image(source, where), info)


def completion(pictures: Sequence[Any], info: VisionInfo | None) -> Callable[[str], str]:
    """What puts a picture's texts around its token in a rendered prompt, where there are pictures and such texts."""
    if not pictures or info is None or not any(info.around):
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
