"""Events or lines, ended when the client leaves or does not read; whole answers, cancelled when it leaves."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from fastapi import Request, Response

from mlcpipe.server.errors import ApiError

_T = TypeVar("_T")
PING_S = 15.0  # of silence
SLOW_READER_S = 30.0  # for a piece to go into the socket
DONE = "data: [DONE]\n\n"
_EVENTS, _LINES = b"text/event-stream; charset=utf-8", b"application/x-ndjson"
_HEADERS = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))


encoded = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
"""JSON in one line; raises ValueError for numbers that it has no words for."""


def event(content: object, name: str | None = None) -> str:
    """One event with JSON data."""
    data = f"data: {encoded(content)}\n\n"
    return data if name is None else f"event: {name}\n{data}"


def line(content: object) -> str:
    """One line of JSON."""
    return encoded(content) + "\n"


def choice_events(frame: dict[str, Any]) -> Callable[[object], str]:
    """Makes events of one choice, whose common fields are encoded once."""
    head = encoded(frame)[:-1]
    return lambda choice: f'data: {head},"choices":[{encoded(choice)}]}}\n\n'


class EventStream(Response):
    """A response of events, or of lines. `close` is called once it ends, for whatever reason.

    `failed` makes the last events of an ApiError; `ping` is sent in silence.
    """

    def __init__(
        self,
        events: AsyncIterator[str],
        close: Callable[[], None],
        failed: Callable[[ApiError], str],
        ping: str = ": ping\n\n",
        headers: Mapping[str, str] | None = None,
        *,
        lines: bool = False,
    ) -> None:
        super().__init__()
        self._kind = _LINES if lines else _EVENTS
        self._more_headers = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        self._events = events
        self._close = close
        self._failed = failed
        self._ping = " " if lines else ping  # JSON may begin with spaces
        self._since, self._sending = time.monotonic(), False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send events until the last, until the reader leaves, or until it has not read for `SLOW_READER_S`."""
        tasks = [asyncio.ensure_future(work) for work in (_left(receive), self._watch(send), self._write(send))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._close()
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        if isinstance(ended[-1], Exception):
            raise ended[-1]

    async def _write(self, send: Any) -> None:
        headers = [(b"content-type", self._kind), *_HEADERS, *self._more_headers]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            async for text in self._events:
                await self._send(send, text)
        except ApiError as error:
            await self._send(send, self._failed(error))
        await send({"type": "http.response.body", "body": b""})

    async def _watch(self, send: Any) -> None:
        """Ping in silence, and return when a piece was not written to the socket for `SLOW_READER_S`.

        One task for the whole stream: a task and a timer for each piece would cost more than the piece.
        """
        while True:
            sending = self._sending
            wait = self._since + (SLOW_READER_S if sending else PING_S) - time.monotonic()
            if wait > 0:
                await asyncio.sleep(min(wait, SLOW_READER_S))
            elif sending:
                return
            else:
                try:
                    await asyncio.wait_for(self._send(send, self._ping), SLOW_READER_S)
                except asyncio.TimeoutError:
                    return

    async def _send(self, send: Any, text: str) -> None:
        self._since, self._sending = time.monotonic(), True
        await send({"type": "http.response.body", "body": text.encode("utf-8", errors="replace"), "more_body": True})
        self._sending = False


async def unless_left(request: Request, work: Coroutine[Any, Any, _T], close: Callable[[], None]) -> _T:
    """The result of `work`, which is cancelled when the client leaves. `close` is called at the end."""
    left, doing = asyncio.ensure_future(_left(request.receive)), asyncio.ensure_future(work)
    try:
        await asyncio.wait((left, doing), return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise ApiError(499, "the client closed the connection")
        return doing.result()
    finally:
        for task in (left, doing):
            task.cancel()
        await asyncio.gather(left, doing, return_exceptions=True)
        close()


async def _left(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
