"""The content of messages: texts, and pictures as parts in the form of the OpenAI API, that of all chat APIs inside.

Videos are parts in vLLM's form, `video_url`.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mlcpipe.server.bodies import MAX_ITEMS
from mlcpipe.server.errors import ApiError

_TEXTS = ("text", "input_text", "output_text", "refusal")
_KINDS = {"image_url": "image", "video_url": "video"}  # a part's type in these APIs, and its kind
_FRAMES = "data:video/jpeg;base64"  # vLLM's form of frames, which commas separate
SCHEMES = ("http://", "https://")


def listed(value: Any, where: str) -> Sequence[Any]:
    """`value`, checked to be a list of at most `MAX_ITEMS`. Raises ApiError."""
    if not isinstance(value, list) or len(value) > MAX_ITEMS:
        raise ApiError(400, f"{where}: expected a list of at most {MAX_ITEMS}", param=where)
    return value


def text_of(content: Any, where: str) -> str:
    """Text, or the texts of a list of parts. Raises ApiError for pictures, sound and files."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in listed(content, where):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("text", part.get("refusal")) if isinstance(part, Mapping) else None
        if kind not in _TEXTS or not isinstance(text, str):
            shown = kind if isinstance(kind, str) else type(part).__name__
            raise ApiError(400, f"{where}: expected text, found {shown[:40]!r}; send text only", param=where)
        texts.append(text)
    return "\n".join(texts)


def content_of(content: Any, where: str) -> str | list[dict[str, Any]]:
    """As `text_of`; with pictures among its parts a list of parts for `mlcpipe.runtime.pictures`. Raises ApiError."""
    if not isinstance(content, list) or not any(map(is_picture, content)):
        return text_of(content, where)
    return [
        _read(part, place_of(part, f"{where}[{at}].{part['type']}"))
        if is_picture(part)
        else {"type": "text", "text": text_of([part], f"{where}[{at}]")}
        for at, part in enumerate(listed(content, where))
    ]


def split_pictures(content: Any, where: str) -> tuple[str, list[dict[str, Any]]]:
    """The text of a content, and its pictures in the form of `content_of`. Raises ApiError."""
    parts = content_of(content, where)
    if isinstance(parts, str):
        return parts, []
    texts = [part["text"] for part in parts if part["type"] == "text"]
    return "\n".join(texts), [part for part in parts if part["type"] != "text"]


class PlacedMessage(dict[str, Any]):
    """A message of the OpenAI API that is made of something else; `where` and where its `content` is in what the client
    sent.
    """

    def __init__(self, message: Mapping[str, Any], where: str, content: str | None = None) -> None:
        super().__init__(message)
        self.where = where
        self.content = f"{where}.content" if content is None else content


def places_of(message: Mapping[str, Any], index: int) -> tuple[str, str]:
    """Where the client has put the message at `index`, and its content."""
    if isinstance(message, PlacedMessage):
        return message.where, message.content
    return f"messages[{index}]", f"messages[{index}].content"


class PlacedPicture(dict[str, Any]):
    """A picture as a part of a message of the OpenAI API; `where` it is in what the client sent."""

    def __init__(self, where: str, part: Mapping[str, Any]) -> None:
        super().__init__(part)
        self.where = where


def picture(url: Any, detail: Any = None, *, where: str | None = None, kind: str = "image_url") -> dict[str, Any]:
    """A picture as a part of a message of the OpenAI API, `where` the client has put it if not in such a message."""
    part = {"type": kind, kind: {"url": url, "detail": detail}}
    return part if where is None else PlacedPicture(where, part)


def place_of(part: Mapping[str, Any], where: str) -> str:
    """Where the client has put a picture, which is at `where` of the messages."""
    return part.where if isinstance(part, PlacedPicture) else where


def is_picture(part: Any) -> bool:
    """Whether a part of a message is a picture or a video."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    return isinstance(kind, str) and kind in _KINDS and kind in part


def pictures_in(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The places and parts of all pictures of messages that are not checked yet."""
    for index, message in enumerate(messages):
        content, (_, where) = message.get("content"), places_of(message, index)
        for at, part in enumerate(content if isinstance(content, list) else ()):
            if is_picture(part):
                yield place_of(part, f"{where}[{at}].{part['type']}"), part


def url_of(part: Mapping[str, Any]) -> Any:
    """The URL of a picture, which may be in an object with `detail`; bytes are those that were fetched from one."""
    image = part[part["type"]]
    return image.get("url") if isinstance(image, Mapping) else image


def detail_of(part: Mapping[str, Any]) -> Any:
    """The resolution that a client wants of a picture."""
    image = part[part["type"]]
    return image.get("detail") if isinstance(image, Mapping) else None


def _read(part: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A picture or a video in the form of `mlcpipe.runtime.pictures`. Raises ApiError."""
    kind = _KINDS[part["type"]]
    return {"type": kind, kind: _data(part, kind, where), "where": where}


def _data(part: Mapping[str, Any], kind: str, where: str) -> bytes | list[bytes]:
    """The bytes of a data: URL, or of each frame. Raises ApiError for others."""
    detail, url = detail_of(part), url_of(part)
    if detail not in (None, "auto", "high", "original"):
        raise ApiError(400, f"{where}.detail: expected auto or high: pictures have one resolution", param=where)
    if isinstance(url, bytes):
        return url
    head, comma, data = url.partition(",") if isinstance(url, str) else ("", "", "")
    head = head.lower()
    if not comma or not head.startswith(f"data:{kind}/") or not head.endswith(";base64"):
        shown, remote = repr(url)[:60], isinstance(url, str) and url.lower().startswith(SCHEMES)
        more = "; the server fetches pictures with --allow-remote-images alone" if remote else ""
        raise ApiError(400, f"{where}: expected data:{kind}/…;base64,…, found {shown}{more}", param=where)
    try:
        if head == _FRAMES:
            return [base64.b64decode(frame, validate=True) for frame in data.split(",", MAX_ITEMS)]
        return base64.b64decode(data, validate=True)
    except ValueError:
        raise ApiError(400, f"{where}: expected base64", param=where) from None
