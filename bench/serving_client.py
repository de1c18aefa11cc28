"""A streaming client of OpenAI's API that notes when each piece came, and costs the server's machine little."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

_PATHS = {"chat": "chat/completions", "completions": "completions"}
_TEXT = ("content", "reasoning_content", "reasoning", "tool_calls", "text")
Parts = list[tuple[float, bytes]]  # what came from a socket, and when


@dataclass(frozen=True)
class Target:
    """A server: `url` with or without `/v1`; `api` is chat or completions; `model` as it is called there."""

    url: str
    api: str = "chat"
    model: str | None = None
    key: str | None = None
    timeout_s: float = 600.0


@dataclass(frozen=True)
class Answer:
    """One answer; times on the clock of `time.perf_counter`, seconds.

    sent, ended     of the request
    pieces          when each event with something of the answer came
    prompt, tokens  counts of tokens as the server says, else 0 and the number of pieces
    error           what went wrong, or ""
    """

    sent: float
    ended: float = 0.0
    pieces: list[float] = field(default_factory=list)
    prompt: int = 0
    tokens: int = 0
    error: str = ""


async def first_model(target: Target) -> str:
    """The first model that the server lists. Raises OSError, EOFError, ValueError or LookupError where there is none."""
    return str(json.loads(_response(await _exchange(target, "GET", "models"))[1][0][1])["data"][0]["id"])


async def ask(target: Target, prompt: str, max_tokens: int) -> Answer:
    """One request for `max_tokens`, streamed to its end; what goes wrong is in the answer."""
    return (await send(target, prompt, max_tokens))()


async def send(
    target: Target,
    prompt: str,
    max_tokens: int,
    *,
    schema: Mapping[str, Any] | None = None,
    came: Callable[[int], None] | None = None,
) -> Callable[[], Answer]:
    """As `ask`, but what came is read in the call of the result, so that it takes no time from the server.

    `came` is told after each part of the answer how many there are. With `schema` the answer is JSON that matches it;
    else servers that know `ignore_eos` (ours, vLLM's, llama.cpp's) give exactly so many tokens.
    """
    text = {"prompt": prompt} if target.api == "completions" else {"messages": [{"role": "user", "content": prompt}]}
    body = {
        **text, "model": target.model, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": schema is None,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    if schema is not None:
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
        body |= {"response_format": form, "json_schema": schema}  # the latter for llama.cpp's completions
    answer = Answer(time.perf_counter())
    try:
        parts = await asyncio.wait_for(_exchange(target, "POST", _PATHS[target.api], body, came), target.timeout_s)
    except (OSError, asyncio.TimeoutError) as error:
        failed = replace(answer, ended=time.perf_counter(), error=str(error) or type(error).__name__)
        return lambda: failed
    answer = replace(answer, ended=time.perf_counter())
    return lambda: _read(answer, parts)


def _read(answer: Answer, parts: Parts) -> Answer:
    """The answer with the content of its parts."""
    usage = {"prompt_tokens": 0, "completion_tokens": 0}
    try:
        status, lines = _response(parts)
        for when, line in lines if status == 200 else []:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    raise ValueError(event["error"].get("message", "the server sent an error"))
                usage.update(event.get("usage") or {})
                if any(choice.get("delta", choice).get(name) for choice in event["choices"] for name in _TEXT):
                    answer.pieces.append(when)
        if usage["completion_tokens"] and not answer.pieces:  # all without text, as random weights draw them
            answer.pieces.append(answer.ended)
        if status != 200 or not answer.pieces:
            data = b"\n".join(line for _, line in lines)
            raise ValueError(f"status {status}: {data[:300].decode(errors='replace') or 'an empty answer'}")
    except (ValueError, EOFError) as error:
        answer = replace(answer, error=str(error) or type(error).__name__)
    tokens = usage["completion_tokens"] or len(answer.pieces)
    return replace(answer, prompt=usage["prompt_tokens"], tokens=tokens)


class _Exchange(asyncio.Protocol):
    """Sends a request, and keeps what comes until the server closes the connection."""

    def __init__(self, request: bytes, came: Callable[[int], None] | None) -> None:
        self.parts: Parts = []
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request, self._came = request, came

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.parts.append((time.perf_counter(), data))
        if self._came is not None:
            self._came(len(self.parts))

    def connection_lost(self, error: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None) if error is None else self.closed.set_exception(error)


async def _exchange(
    target: Target, method: str, path: str, body: object = None, came: Callable[[int], None] | None = None
) -> Parts:
    """The whole response to a request. Raises OSError."""
    parts = urlsplit(target.url)
    root, tls = parts.path.rstrip("/").removesuffix("/v1"), parts.scheme == "https"
    data = b"" if body is None else json.dumps(body).encode()
    head = [f"{method} {root}/v1/{path} HTTP/1.1", f"Host: {parts.netloc}", "Connection: close"]
    head += ["Content-Type: application/json", f"Content-Length: {len(data)}"]
    head += [f"Authorization: Bearer {target.key}"] if target.key else []
    request = "\r\n".join([*head, "", ""]).encode() + data
    transport, exchange = await asyncio.get_running_loop().create_connection(
        lambda: _Exchange(request, came),
        parts.hostname,
        parts.port or (443 if tls else 80),
        ssl=ssl.create_default_context() if tls else None,
    )
    try:
        await exchange.closed
    finally:
        transport.close()
    return exchange.parts


def _response(parts: Parts) -> tuple[int, Parts]:
    """The status and the lines of a response. Raises ValueError, and EOFError where it is not whole."""
    head, found, _ = b"".join(data for _, data in parts).partition(b"\r\n\r\n")
    if not found:
        raise EOFError("the server closed the connection")
    chunked = b"transfer-encoding: chunked" in head.lower()
    return int(head.split(b" ", 2)[1]), list(_lines(parts, len(head) + 4, chunked=chunked))


def _lines(parts: Parts, skip: int, *, chunked: bool) -> Iterator[tuple[float, bytes]]:
    """The lines of a body, which begins after `skip` bytes, each with when its end came. Raises EOFError."""
    raw, rest, size, when = b"", b"", -1, 0.0
    for when, data in parts:
        raw += data[skip:]
        skip = max(0, skip - len(data))
        while chunked and (at := raw.find(b"\r\n")) >= 0:
            size = int(raw[:at].split(b";")[0], 16)
            if len(raw) < at + size + 4:
                break
            rest, raw = rest + raw[at + 2 : at + 2 + size], raw[at + size + 4 :]
        if not chunked:
            rest, raw = rest + raw, b""
        *lines, rest = rest.split(b"\n")
        yield from ((when, line) for line in lines)
    if chunked and (size or raw):
        raise EOFError("the server closed the connection within the answer")
    yield when, rest
