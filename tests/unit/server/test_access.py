"""Requests have names, in responses and errors; lines about them say nothing of what they say. Long work takes turns."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import httpx2
import pytest

pytest.importorskip("fastapi")

from mlcpipe.server.access import Access
from mlcpipe.server.app import create_app
from mlcpipe.server.model_pool import ModelPool
from mlcpipe.server.off_loop import LONG_BYTES, OffLoop
from mlcpipe.server.service import Facts, Service
from tests.unit.server.fake_engine import FakeEngine

CHAT, HELLO = "/v1/chat/completions", [{"role": "user", "content": "a secret"}]


def asked(*requests: tuple[str, Any, dict[str, str]], fails: bool = False) -> tuple[list[Any], list[dict[str, Any]]]:
    """Responses to (path, body, headers), and the lines about them."""
    lines: list[str] = []

    async def ask() -> list[Any]:
        engine = FakeEngine(fails=fails)
        app, guard = create_app()
        app.state.pool = pool = ModelPool.of(Service(engine, engine.tokenizer, Facts(("demo",))))
        transport = httpx2.ASGITransport(app=Access(guard, lines.append))
        async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            got = [await client.post(path, json=body, headers=headers) for path, body, headers in requests]
        pool.close()
        return got

    return asyncio.run(ask()), [json.loads(line) for line in lines]


def test_requests_are_named_in_responses_errors_and_lines() -> None:
    body = {"messages": HELLO, "max_tokens": 5}
    given = {"x-request-id": "mine-1:a.b_c"}
    found, lines = asked(
        (CHAT, body, given), (CHAT, body, {}), (f"{CHAT}?key=hidden", {**body, "n": 99}, {"x-request-id": "a b"}),
        ("/v1/messages", {**body, "max_tokens": -1}, given), ("/nothing", {}, {"x-request-id": "a" * 129}),
    )  # fmt: skip
    names = [one.headers["x-request-id"] for one in found]
    assert names[0] == names[3] == given["x-request-id"] and len({*names}) == 4
    assert all(name.startswith("req_") and len(name) == 28 for name in names[1:3] + names[4:])
    assert [one.json().get("request_id") for one in found] == [None, None, *names[2:]]
    assert found[3].headers["request-id"] == names[3] and "request-id" not in found[0].headers
    assert [(line["request_id"], line["path"], line["status"]) for line in lines] == [
        (names[0], CHAT, 200), (names[1], CHAT, 200), (names[2], CHAT, 400),
        (names[3], "/v1/messages", 400), (names[4], "/nothing", 404),
    ]  # fmt: skip
    keys = {"time", "request_id", "client", "method", "path", "status", "bytes", "seconds"}
    assert all(line.keys() == keys and line["bytes"] == len(one.content) for one, line in zip(found, lines))
    assert not any(word in str(lines) for word in ("secret", "hidden", "Hello"))


def test_an_error_within_a_stream_has_the_name() -> None:
    (found,), _ = asked((CHAT, {"messages": HELLO, "stream": True}, {}), fails=True)
    assert f'"request_id":"{found.headers["x-request-id"]}"' in found.text


def test_long_work_is_done_one_at_a_time_the_smallest_first() -> None:
    go, off_loop, done = threading.Event(), OffLoop(), list[int]()
    sizes = [9, 1, 8, 2, 7]

    async def work() -> None:
        first = asyncio.ensure_future(off_loop.apart(go.wait, LONG_BYTES + 1))
        await asyncio.sleep(0)
        later = [
            asyncio.ensure_future(off_loop.apart(lambda size=size: done.append(size), size * (1 << 30)))  # type: ignore[misc]
            for size in sizes
        ]
        await asyncio.sleep(0)
        later[2].cancel()
        assert await off_loop.apart(lambda: len(done)) == 0  # short work, meanwhile
        go.set()
        await asyncio.gather(first, *later, return_exceptions=True)
        await off_loop.apart(lambda: done.append(0), LONG_BYTES + 1)

    asyncio.run(work())
    off_loop.close()
    assert done == [1, 2, 7, 9, 0]


def test_work_that_leaves_at_its_turn_gives_it_to_the_next() -> None:
    go, off_loop = threading.Event(), OffLoop()

    async def work() -> str:
        first = asyncio.ensure_future(off_loop.apart(go.wait, LONG_BYTES + 1))
        await asyncio.sleep(0)
        left = asyncio.ensure_future(off_loop.apart(lambda: "left", LONG_BYTES + 1))
        await asyncio.sleep(0)
        last = asyncio.ensure_future(off_loop.apart(lambda: "last", LONG_BYTES + 1))
        await asyncio.sleep(0)
        first.add_done_callback(lambda _: left.cancel())
        go.set()
        return await last

    assert asyncio.run(work()) == "last"
    off_loop.close()
