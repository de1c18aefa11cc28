"""Connections that send slowly, badly, or nothing, and more of them than there may be."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest

uvicorn = pytest.importorskip("uvicorn")

from mlcpipe.server import connections
from mlcpipe.server.connections import Connection
from mlcpipe.server.guard import Guard, Rules

MOST = 4
HEAD = b" HTTP/1.1\r\nHost: 127.0.0.1\r\n"
GET, LAST = b"GET /" + HEAD + b"\r\n", b"GET /" + HEAD + b"Connection: close\r\n\r\n"
LONG = b"GET /long" + HEAD + b"\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"


@contextmanager
def server(read_s: float = 0.3) -> Iterator[tuple[Any, threading.Semaphore, threading.Event]]:
    """Its address, how many have asked for `/wait`, and an event before which they get no answer."""
    asked, go = threading.Semaphore(0), threading.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/wait":
            asked.release()
            while not go.is_set():
                await asyncio.sleep(0.01)
        if scope["path"] == "/long":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for _ in range(200):
                await send({"type": "http.response.body", "body": bytes(1 << 20), "more_body": True})
            asked.release()
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    config = uvicorn.Config(
        Guard(app, Rules(), lambda error: None),
        http=partial(Connection, most=MOST, refused=lambda error: None, read_s=read_s),  # type: ignore[arg-type]
        lifespan="off",
        log_level="critical",
        timeout_keep_alive=1,
        timeout_graceful_shutdown=1,
    )
    running = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as bound:
        thread = threading.Thread(target=lambda: asyncio.run(running.serve(sockets=[bound])))
        thread.start()
        try:
            yield bound.getsockname(), asked, go
        finally:
            go.set()
            running.should_exit = True
            thread.join()


def connected(stack: ExitStack, address: Any, data: bytes) -> socket.socket:
    made = stack.enter_context(socket.create_connection(address, timeout=20))
    made.sendall(data)
    return made


def told(made: socket.socket) -> list[int]:
    """The statuses of all responses, until the server closes."""
    found = b""
    try:
        while part := made.recv(1 << 16):
            found += part
    except ConnectionResetError:
        pass
    return [int(one[:3]) for one in found.split(b"HTTP/1.1 ")[1:]]


@pytest.mark.parametrize(
    ("data", "statuses"),
    [
        (b"", []),
        (b"GE", []),
        (b"GET /" + HEAD + b"x-a: ", []),
        (GET, [200]),
        (GET + GET + b"GET /", [200, 200]),
        (GET + b"POST /" + HEAD + b"Content-Length: 2\r\n\r\nab" + LAST, [200, 200, 200]),
        (b"POST / HTTP/1.1\r\nHost: evil.example\r\nContent-Length: 9\r\n\r\nab", [421]),
        (b"GET / HTTP/1.0\r\n\r\n", [200]),
        (b"GET / HTTP/1.0\r\nOrigin: http://\r\n\r\n", [403]),
        (b"GET / HTTP/1.1\nHost: 127.0.0.1\n\n" + LAST, [400]),
        (b"GET /" + HEAD + b"x-a: b\nx-c: d\r\n\r\n" + LAST, [400]),
        (b"GET /" + HEAD + b"x-a: b\r\n c\r\n\r\n" + LAST, [400]),
        (GET + b"GET /" + HEAD + b"x-a: b\r\n\tc\r\n\r\n" + LAST, [200, 400]),
        (b"POST /" + HEAD + b"Content-Length: 5\r\n" + CHUNKED + b"\r\n0\r\n\r\n" + LAST, [400]),
        (b"POST /" + HEAD + CHUNKED + b"Content-Length: 0\r\n\r\n0\r\n\r\n" + LAST, [400]),
        (b"POST / HTTP/1.0\r\nHost: 127.0.0.1\r\n" + CHUNKED + b"\r\n0\r\n\r\n" + LAST, [400]),
        (b"POST /" + HEAD + CHUNKED + b"\r\nzz\r\n" + LAST, [400]),
        (b"POST /" + HEAD + CHUNKED + b"\r\n2;a=b\r\nab\r\n0;c\r\nx-a: b\r\n\r\n" + LAST, [200, 200]),
        (b"POST /" + HEAD + CHUNKED + b"\r\n0\r\n\n" + LAST, [400]),
        (b"POST /" + HEAD + CHUNKED + b"\r\n0\r\nx-a: b\n\n" + LAST, [400]),
        (b"POST /" + HEAD + CHUNKED + b"\r\n0\r\nx-a: b\r\n c\r\n\r\n" + LAST, [400]),
        (b"GET / HTTP/1.1\r\nHost : 127.0.0.1\r\n\r\n" + LAST, [400]),
    ],
    ids=str,
)
def test_what_is_late_or_ambiguous_ends_the_connection(data: bytes, statuses: list[int]) -> None:
    with server() as (address, *_), ExitStack() as stack:
        assert told(connected(stack, address, data)) == statuses


@pytest.mark.parametrize(("chunks", "statuses"), [(3, [200, 200]), (4, [400])])
def test_a_body_has_only_so_many_chunks(chunks: int, statuses: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_MOST_CHUNKS", 3)
    with server() as (address, *_), ExitStack() as stack:
        body = b"\r\n" + chunks * b"1\r\na\r\n" + b"0\r\n\r\n"
        assert told(connected(stack, address, b"POST /" + HEAD + CHUNKED + body + LAST)) == statuses


@pytest.mark.parametrize("data", [b"", b"GET /", GET, b"POST /" + HEAD + b"Content-Length: 9\r\n\r\nab", LONG], ids=str)
def test_those_who_owe_something_give_way(data: bytes) -> None:
    """Whether they have sent nothing, a part of a head or of a body, have an answer already, or do not read it."""
    slow: list[socket.socket] = []
    with server(read_s=60) as (address, *_), ExitStack() as stack:
        for index in range(3 * MOST):
            slow.append(connected(stack, address, data))
            if data == LONG or (data == GET and index == 3 * MOST - 1):
                assert slow[-1].recv(12) == b"HTTP/1.1 200"
        assert told(connected(stack, address, LAST)) == [200]
        assert all(told(one) in ([], [200]) for one in slow[: 2 * MOST])


@pytest.mark.parametrize(("local", "most"), [(True, MOST), (False, MOST // 2)])
def test_where_all_wait_for_answers_a_new_one_is_refused(
    local: bool, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the connections may be of one address of another machine."""
    monkeypatch.setattr(connections, "is_loopback", lambda host: local)
    wait = b"GET /wait" + HEAD + b"Connection: close\r\n\r\n"
    with server() as (address, asked, go), ExitStack() as stack:
        waiting = []
        for _ in range(most):
            waiting.append(connected(stack, address, wait))
            assert asked.acquire(timeout=20)
        assert [told(connected(stack, address, data)) for data in (LAST, GET, b"")] == [[503]] * 3
        go.set()
        assert [told(one) for one in waiting] == [[200]] * most
        assert told(connected(stack, address, LAST)) == [200]


def test_a_server_that_ends_waits_for_no_body() -> None:
    with ExitStack() as stack:
        with server(read_s=60) as (address, *_):
            part = connected(stack, address, b"POST /" + HEAD + b"Content-Length: 9\r\nExpect: 100-continue\r\n\r\n")
            assert part.recv(12) == b"HTTP/1.1 100"  # its body is waited for
            part.sendall(b"ab")
        assert told(part) == [503]


def test_a_client_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "SLOW_READER_S", 0.2)
    with server() as (address, asked, _), ExitStack() as stack:
        connected(stack, address, LONG)
        assert asked.acquire(timeout=20)


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("127.0.0.2", ""),
        ("::1", ""),
        ("::ffff:127.0.0.1", ""),
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:0:1:2::3", "2001:db8:0:1::/64"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_a_client_is_known_by_its_network(host: str, network: str) -> None:
    assert connections._network(host) == network


def test_connections_leave_descriptors_for_other_files() -> None:
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert 0 < connections.most_connections() <= connections.MOST
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        most = connections.most_connections()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert 0 < most <= 256 - 4 * connections.ACCEPTED_AT_ONCE - 64
