"""Pictures of URLs: from public addresses alone, as they were resolved, with bounds; checked against servers here."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

pytest.importorskip("fastapi")

from mlcpipe.server import remote_pictures
from mlcpipe.server.errors import ApiError
from mlcpipe.server.message_content import picture
from mlcpipe.server.remote_pictures import RemotePictures, is_public, resolved

HOST = "pictures.example"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server: Any = self.server
        server.asked.append((self.headers["Host"], self.path))
        status, headers, body = server.pages.get(self.path, (404, {}, b""))
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *values: Any) -> None:
        pass


@contextmanager
def serving(address: str, pages: dict[str, Any]) -> Iterator[Any]:
    server: Any = ThreadingHTTPServer((address, 0), Handler)
    server.pages, server.asked = pages, []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def messages(*urls: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*map(picture, urls), {"type": "text", "text": "?"}]}]


def fetched(given: list[dict[str, Any]], names: dict[str, list[str]], public: tuple[str, ...] = ()) -> Any:
    """The messages with what was fetched: the resolver knows `names` alone, and some addresses here count as public."""

    async def resolve(host: str, port: int) -> list[str]:
        return names[host] if host in names else await resolved(host, port)

    async def run() -> Any:
        remote = RemotePictures(resolve, lambda address: address in public or is_public(address))
        async with remote.fetched(given) as found:
            return found

    return asyncio.run(run())


def test_pictures_come_from_the_address_that_was_checked() -> None:
    moved = (302, {"Location": "/b.png?x=1"}, b"")
    with serving("127.0.0.1", {"/a.png": moved, "/b.png?x=1": (200, {}, b"png"), "/c": (200, {}, b"")}) as server:
        base = f"http://{HOST}:{server.server_port}"
        data = "data:image/png;base64,AAAA"
        given = messages(f"{base}/a.png#top", data, f"{base}/a.png#top", f"{base}/c")
        (message,) = fetched(given, {HOST: ["127.0.0.1"]}, ("127.0.0.1",))
        urls = [part["image_url"]["url"] for part in message["content"][:-1]]
        assert urls == [b"png", data, b"png", b""] and message["content"][-1] == given[0]["content"][-1]
        name = f"{HOST}:{server.server_port}"
        assert server.asked == [(name, "/a.png"), (name, "/b.png?x=1"), (name, "/c")]  # once for both


@pytest.mark.parametrize("addresses", [["127.0.0.1"], ["127.0.0.2", "127.0.0.1"], ["::1"], ["::ffff:127.0.0.1"], []])
def test_a_name_of_no_public_address_is_not_asked(addresses: list[str]) -> None:
    with serving("127.0.0.1", {"/a.png": (200, {}, b"png")}) as server:
        url = f"http://{HOST}:{server.server_port}/a.png"
        with pytest.raises(ApiError, match=r"messages\[0\]\.content\[0\].*no public address") as refused:
            fetched(messages(url), {HOST: addresses}, ("127.0.0.2",))
        assert refused.value.status == 400 and not server.asked


def test_redirects_lead_into_no_network() -> None:
    with serving("127.0.0.1", {}) as inner, serving("127.0.0.2", {}) as server:
        there = f"http://127.0.0.1:{inner.server_port}/secret"
        server.pages |= {
            "/in": (302, {"Location": there}, b""),
            "/name": (307, {"Location": f"http://inner.example:{inner.server_port}/secret"}, b""),
            "/file": (302, {"Location": "file:///etc/passwd"}, b""),
            "/loop": (302, {"Location": "/loop"}, b""),
            "/none": (301, {}, b""),
            "/bracket": (302, {"Location": "http://["}, b""),
        }
        names = {HOST: ["127.0.0.2"], "inner.example": ["127.0.0.1"]}
        for path, words in (
            ("/in", "no public address"), ("/name", "no public address"), ("/file", "expected a URL of http or https"),
            ("/loop", "at most 3 redirects"), ("/none", "at most 3 redirects"), ("/gone", "status 404"),
            ("/bracket", "expected a redirect to a URL"),
        ):  # fmt: skip
            with pytest.raises(ApiError, match=words):
                fetched(messages(f"http://{HOST}:{server.server_port}{path}"), names, ("127.0.0.2",))
        assert not inner.asked


def test_bytes_time_and_count_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_pictures, "MAX_BYTES", 6)
    unsaid = (200, {"Content-Length": "4", "Content-Encoding": "gzip"}, b"four")  # it is not unpacked
    pages = {"/four": unsaid, "/more": (200, {}, b"more"), "/cut": (200, {"Content-Length": "5"}, b"ab")}
    with serving("127.0.0.1", pages) as server:
        base, names = f"http://{HOST}:{server.server_port}", {HOST: ["127.0.0.1"]}
        (message,) = fetched(messages(f"{base}/four"), names, ("127.0.0.1",))
        assert message["content"][0]["image_url"]["url"] == b"four"
        for urls, words in (
            ([f"{base}/four", f"{base}/more"], "MiB of pictures"),
            ([f"{base}/{each}" for each in range(17)], "at most 16 pictures"),
            ([f"http://a:b@{HOST}/"], "without a password"),
            ([f"{base}/{'a' * 9000}"], "at most 8192 characters"),
            (["http://[::1"], "expected a URL of http or https"),
            (["http://"], "with a host"),
            ([f"http://{HOST}:99999/"], "with a host"),
        ):
            with pytest.raises(ApiError, match=words):
                fetched(messages(*urls), names, ("127.0.0.1",))
    with pytest.raises(ApiError, match="cannot be reached"):
        fetched(messages(f"{base}/four"), names, ("127.0.0.1",))


def test_no_more_than_a_few_requests_are_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    inside = most = 0

    async def run() -> list[BaseException | None]:
        full = asyncio.Event()

        async def resolve(host: str, port: int) -> list[str]:
            nonlocal inside, most
            inside += 1
            most = max(most, inside)
            if inside == remote_pictures.AT_ONCE:
                full.set()
            await full.wait()
            inside -= 1
            return []

        remote = RemotePictures(resolve)

        async def one() -> None:
            async with remote.fetched(messages(f"http://{HOST}/")):
                raise AssertionError

        places = remote_pictures.AT_ONCE + remote_pictures.MAX_WAITING
        return await asyncio.gather(*[one() for _ in range(places + 1)], return_exceptions=True)

    *ends, refused = asyncio.run(run())
    assert most == remote_pictures.AT_ONCE
    assert all(isinstance(end, ApiError) and "no public address" in end.message for end in ends)
    assert isinstance(refused, ApiError) and refused.status == 503
    monkeypatch.setattr(remote_pictures, "DEADLINE_S", 0)
    with pytest.raises(ApiError, match="did not come within"):
        fetched(messages(f"http://{HOST}/"), {})


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True), ("2606:2800:220:1::1", True), ("64:ff9b::5db8:d822", True), ("127.1.2.3", False),
        ("10.0.0.1", False), ("172.16.9.9", False), ("192.168.1.1", False), ("169.254.169.254", False),
        ("100.64.0.1", False), ("0.0.0.0", False), ("224.0.0.1", False), ("255.255.255.255", False), ("::", False),
        ("fe80::1%eth0", False), ("fc00::1", False), ("ff02::1", False), ("::ffff:10.0.0.1", False),
        ("64:ff9b::a00:1", False), ("2002:a00:1::", False), ("2001:0:5db8:d822::f5ff:fffe", False), ("::7f00:1", False),
        ("fec0::1", False),
    ],
)  # fmt: skip
def test_public_addresses(address: str, public: bool) -> None:
    assert is_public(address) is public
