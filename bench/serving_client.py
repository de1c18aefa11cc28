"""A streaming client of OpenAI's API that notes when each piece came, and costs the server's machine little."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

_BUFFER = 1 << 20
_PATHS = {"chat": "chat/completions", "completions": "completions"}
_TEXT = ("content", "reasoning_content", "reasoning", "tool_calls", "text")


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
    return str(json.loads((await _exchange(target, "GET", "models"))[1])["data"][0]["id"])


async def ask(target: Target, prompt: str, max_tokens: int) -> Answer:
    """One request for `max_tokens`, streamed to its end; what goes wrong is in the answer.

    Servers that know `ignore_eos` (ours, vLLM's, llama.cpp's) give exactly so many tokens.
    """
    text = {"prompt": prompt} if target.api == "completions" else {"messages": [{"role": "user", "content": prompt}]}
    body = {
        **text, "model": target.model, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    answer, usage = Answer(time.perf_counter()), {"prompt_tokens": 0, "completion_tokens": 0}

    def came(line: bytes) -> None:
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            if "error" in event:
                raise ValueError(event["error"].get("message", "the server sent an error"))
            usage.update(event.get("usage") or {})
            if any(choice.get("delta", choice).get(name) for choice in event["choices"] for name in _TEXT):
                answer.pieces.append(time.perf_counter())

    try:
        work = _exchange(target, "POST", _PATHS[target.api], body, came)
        status, data = await asyncio.wait_for(work, target.timeout_s)
        if status != 200 or not answer.pieces:
            raise ValueError(f"status {status}: {data[:300].decode(errors='replace') or 'an empty answer'}")
    except (OSError, ValueError, EOFError, asyncio.TimeoutError) as error:
        answer = replace(answer, error=str(error) or type(error).__name__)
    tokens = usage["completion_tokens"] or len(answer.pieces)
    return replace(answer, ended=time.perf_counter(), prompt=usage["prompt_tokens"], tokens=tokens)


async def _exchange(target: Target, method: str, path: str, body: object = None, each: Any = None) -> tuple[int, bytes]:
    """The status and the body of a response; a good one goes by lines to `each` instead, as they come."""
    parts = urlsplit(target.url)
    root, tls = parts.path.rstrip("/").removesuffix("/v1"), parts.scheme == "https"
    data = b"" if body is None else json.dumps(body).encode()
    head = [f"{method} {root}/v1/{path} HTTP/1.1", f"Host: {parts.netloc}", "Connection: close"]
    head += ["Content-Type: application/json", f"Content-Length: {len(data)}"]
    head += [f"Authorization: Bearer {target.key}"] if target.key else []
    context = ssl.create_default_context() if tls else None
    port = parts.port or (443 if tls else 80)
    reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=context, limit=_BUFFER)
    try:
        writer.write("\r\n".join([*head, "", ""]).encode() + data)
        answer = (await reader.readuntil(b"\r\n\r\n")).lower()
        status, rest, whole = int(answer.split(b" ", 2)[1]), b"", b""
        while data := await _piece(reader, chunked=b"transfer-encoding: chunked" in answer):
            if each is None or status != 200:
                whole += data
                continue
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                each(line)
        return status, whole
    finally:
        writer.close()


async def _piece(reader: asyncio.StreamReader, *, chunked: bool) -> bytes:
    """The next part of a body, empty at its end."""
    if not chunked:
        return await reader.read(_BUFFER)
    size = int((await reader.readline()).split(b";")[0], 16)
    return (await reader.readexactly(size + 2))[:size]
