"""Many clients at once, of whom some leave: nothing is left behind."""

from __future__ import annotations

import asyncio
import random
import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import psutil
import pytest

pytest.importorskip("fastapi")
pytestmark = pytest.mark.full

from tests.server.conftest import Running, running_server

AT_ONCE = 50
LENGTHS = 1, 8, 120  # tokens of answers
SOAK, SOAK_LENGTHS = 100_000, (1, 3, 24)  # requests, of whom few shall compute much
MAX_GROWTH = 32 << 20  # bytes; what leaks with each of 500 requests shows


@pytest.fixture(scope="module")
def busy(demo_bundle: Path) -> Iterator[Running]:
    with running_server(
        demo_bundle, "--max-queue", 4 * AT_ONCE, "--threads", 2, "--sequences", 4, life_s=4 * 3600
    ) as running:
        yield running


async def ask(client: httpx2.AsyncClient, seed: int, lengths: tuple[int, ...]) -> str:
    """One request, whole or streamed; a third of them is left before its end."""
    draw = random.Random(seed)
    body = {"messages": [{"role": "user", "content": f"hello {seed % 7}"}], "max_tokens": draw.choice(lengths), "ignore_eos": True, "temperature": 1}  # fmt: skip
    leaves = draw.random() < 0.33
    if draw.random() < 0.5:
        try:
            answer = await asyncio.wait_for(client.post("/v1/chat/completions", json=body), 0.01 if leaves else 60)
        except asyncio.TimeoutError:
            return "left"
        assert answer.json()["usage"]["completion_tokens"] == body["max_tokens"]
        return "whole"
    async with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as stream:
        async for line in stream.aiter_lines():
            if leaves and '"content":"' in line and '"content":""' not in line:
                return "left"
            if line == "data: [DONE]":
                return "whole"
    return "broken"


async def rounds(url: str, first: int, count: int, lengths: tuple[int, ...] = LENGTHS) -> Counter[str]:
    """How so many requests ended."""
    ended: Counter[str] = Counter()
    limits = httpx2.Limits(max_connections=AT_ONCE)
    async with httpx2.AsyncClient(base_url=url, timeout=60, limits=limits) as client:
        for begin in range(first, first + count, AT_ONCE):
            ended.update(await asyncio.gather(*(ask(client, begin + i, lengths) for i in range(AT_ONCE))))
    return ended


def test_nothing_is_left_behind(busy: Running) -> None:
    process = psutil.Process(busy.process.pid)
    asyncio.run(rounds(busy.url, 0, 4 * AT_ONCE))
    before = process.memory_info().rss
    ended = asyncio.run(rounds(busy.url, 1000, 500))
    assert set(ended) == {"left", "whole"}
    assert_idle(busy)
    assert process.memory_info().rss - before < MAX_GROWTH


def assert_idle(busy: Running) -> None:
    """Nothing runs or waits, requests were cancelled, and nothing failed.

    Of 700 requests some 38 leave an answer of 120 tokens at its first one; a third of these would be enough.
    """
    with httpx2.Client(base_url=busy.url, timeout=60) as client:
        client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}], "max_tokens": 1})
        facts = client.get("/status").json()
    assert (facts["running"], facts["waiting"]) == (0, 0)
    assert facts["finished"]["cancelled"] > 12
    assert not any("Traceback" in line for line in busy.lines)


def half_open(url: str, count: int) -> list[socket.socket]:
    """Connections whose request never ends, or whose answer nobody reads."""
    address = urlsplit(url)
    body = b'{"prompt": "hello", "max_tokens": 1500, "ignore_eos": true, "stream": true}'
    sockets = []
    for index in range(count):
        raw = socket.create_connection((address.hostname or "", address.port or 0), timeout=20)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Length: {len(body)}\r\n\r\n"
        raw.sendall(head.encode() + (body if index % 2 else body[:9]))
        sockets.append(raw)
    return sockets


@pytest.mark.everything
def test_a_hundred_thousand_requests_leave_nothing(busy: Running) -> None:
    """With a third that leave, slow readers and half-open connections."""
    process = psutil.Process(busy.process.pid)
    asyncio.run(rounds(busy.url, 0, 10 * AT_ONCE, SOAK_LENGTHS))
    before = process.memory_info().rss
    for begin in range(0, SOAK, 20 * AT_ONCE):
        sockets = half_open(busy.url, 10)
        ended = asyncio.run(rounds(busy.url, begin, 20 * AT_ONCE, SOAK_LENGTHS))
        assert set(ended) == {"left", "whole"}
        for raw in sockets:
            raw.close()
    assert_idle(busy)
    assert process.memory_info().rss - before < MAX_GROWTH
