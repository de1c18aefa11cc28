"""Streams end when nobody reads, when a reader leaves, and when an answer fails; pings come in silence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

pytest.importorskip("fastapi")

from mlcpipe.server import sse
from mlcpipe.server.errors import ApiError
from mlcpipe.server.sse import EventStream


async def never() -> Any:
    await asyncio.Event().wait()


def run(
    events: AsyncIterator[str],
    *,
    receive: Any = never,
    stuck: bool = False,
    seen: Callable[[dict[str, Any]], None] = lambda message: None,
) -> tuple[list[bytes], bool, int]:
    """What was sent, and shown to `seen`; whether the last piece was, and how often the stream was closed."""
    sent: list[dict[str, Any]] = []
    closed: list[int] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)
        seen(message)
        if stuck and message["type"] == "http.response.body":
            await asyncio.Event().wait()

    stream = EventStream(events, lambda: closed.append(1), lambda error: f"failed {error.status}")
    asyncio.run(asyncio.wait_for(stream({}, receive, send), 60))
    bodies = [message for message in sent if message["type"] == "http.response.body"]
    return [one["body"] for one in bodies], bool(bodies) and not bodies[-1].get("more_body"), len(closed)


async def words(*given: str) -> AsyncIterator[str]:
    for one in given:
        yield one


def test_events_are_sent_in_order() -> None:
    assert run(words("a", "b")) == ([b"a", b"b", b""], True, 1)


def test_a_reader_that_does_not_read_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "SLOW_READER_S", 0.05)
    assert run(words("a", "b"), stuck=True) == ([b"a"], False, 1)


@pytest.mark.parametrize("turns", range(8))
def test_a_reader_that_leaves_ends_the_work(turns: int) -> None:
    """Whatever the writer is doing then: it takes so many turns of the loop for a word."""
    ended = []

    async def endless() -> AsyncIterator[str]:
        try:
            while True:
                await asyncio.sleep(0)
                yield "a"
        finally:
            ended.append(1)

    async def leave() -> Any:
        for _ in range(20 + turns):
            await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    sent, whole, closed = run(endless(), receive=leave)
    assert sent and not whole
    assert (closed, len(ended)) == (1, 1)


def test_a_failure_is_the_last_event() -> None:
    async def fails() -> AsyncIterator[str]:
        yield "a"
        raise ApiError(503, "no")

    assert run(fails()) == ([b"a", b"failed 503", b""], True, 1)


def test_silence_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "PING_S", 0.02)
    pinged = asyncio.Event()

    async def silent() -> AsyncIterator[str]:
        await pinged.wait()
        yield "a"

    sent, whole, _ = run(silent(), seen=lambda message: pinged.set() if message.get("body") else None)
    assert sent[0] == b": ping\n\n" and sent[-2:] == [b"a", b""]
    assert whole
