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

from mlcpipe.runtime.pictures import marked
from mlcpipe.server import remote_pictures
from mlcpipe.server.errors import ApiError
from mlcpipe.server.message_blocks import messages_of
from mlcpipe.server.message_content import picture
from mlcpipe.server.ollama.answering import _message
from mlcpipe.server.prompts import plain_messages
from mlcpipe.server.remote_pictures import RemotePictures, held_bytes, is_public, resolved
from mlcpipe.server.response_items import messages_of as items_as_messages

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
        given[0]["content"].insert(4, picture(f"{base}/c", kind="video_url"))
        (message,) = fetched(given, {HOST: ["127.0.0.1"]}, ("127.0.0.1",))
        *parts, video, _ = message["content"]
        assert video["type"] == "video_url" and video["video_url"]["url"] == b""
        urls = [part["image_url"]["url"] for part in parts]
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


def test_no_more_than_some_requests_are_inside_whatever_their_models(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> tuple[list[Any], Any]:
        free, inside = asyncio.Event(), 0

        async def resolve(host: str, port: int) -> list[str]:
            nonlocal inside
            inside += 1
            await free.wait()
            return []

        remotes = [RemotePictures(resolve), RemotePictures(resolve)]

        async def one(number: int) -> None:
            async with remotes[number % 2].fetched(messages(f"http://{HOST}/")):
                raise AssertionError

        running = [asyncio.ensure_future(one(number)) for number in range(remote_pictures.AT_ONCE)]
        while inside < len(running):
            await asyncio.sleep(0)
        (refused,) = await asyncio.gather(one(0), return_exceptions=True)
        free.set()
        ends = await asyncio.gather(*running, return_exceptions=True)
        with pytest.raises(ApiError, match="no public address"):  # there is room again
            await one(1)
        return ends, refused

    ends, refused = asyncio.run(run())
    assert all(isinstance(end, ApiError) and "no public address" in end.message for end in ends)
    assert isinstance(refused, ApiError) and refused.status == 503
    monkeypatch.setattr(remote_pictures, "DEADLINE_S", 0)
    with pytest.raises(ApiError, match="did not come within"):
        fetched(messages(f"http://{HOST}/"), {})


def test_slow_servers_delay_no_small_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many large pictures stop in their middle: a small one comes, and large ones once there is room."""
    monkeypatch.setattr(remote_pictures, "OWN_BYTES", 10)
    monkeypatch.setattr(remote_pictures, "HELD_BYTES", 100)

    async def run() -> None:
        held = held_bytes()
        slow = [held.enter() for _ in range(8)]
        for number in slow[:6]:
            await held.take(number, 25)  # 15 in addition to its own: 90 together
        assert held_bytes() is held
        small, large = held.enter(), held.enter()
        await held.take(small, 10)
        waits = asyncio.ensure_future(held.take(large, 25))
        oldest = asyncio.ensure_future(held.take(slow[0], 1000))
        await asyncio.sleep(0)
        assert oldest.done() and not waits.done()
        held.leave(small)
        await asyncio.sleep(0)
        assert not waits.done()
        held.leave(slow[0])
        await waits
        waits = asyncio.ensure_future(held.take(slow[7], 25))
        await asyncio.sleep(0)
        assert not waits.done()
        waits.cancel()  # its client leaves
        for number in (*slow[1:], large):
            held.leave(number)
        await held.take(held.enter(), 1000)

    asyncio.run(run())


def test_a_refused_picture_is_named_as_its_client_placed_it() -> None:
    image = {"type": "image", "source": {"type": "url", "url": "http://[::1"}}
    text = {"type": "text", "text": "a"}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [text, image]}
    for content, place in (
        ([text, image], r"messages\[3\]\.content\[1\]\.source: "),
        ([text, result], r"messages\[3\]\.content\[1\]\.content\[1\]\.source: "),
    ):
        system = [{"role": "system", "content": "b"}, {"role": "system", "content": "c"}]
        given = [*system, *messages_of({"role": "user", "content": content}, "messages[3]")]
        with pytest.raises(ApiError, match=place):
            fetched(given, {})
        with pytest.raises(ApiError, match=place):
            plain_messages(given)
    broken = messages_of({"role": "user", "content": [{**image, "source": {
        "type": "base64", "media_type": "image/png", "data": "AAAA"}}]}, "messages[5]")  # fmt: skip
    _, sources = marked(plain_messages([*system, *broken]))
    assert [where for where, _ in sources] == ["messages[5].content[0].source"]


def test_so_is_one_of_responses_and_of_ollama() -> None:
    """Without the messages that the server puts before them."""
    part = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    item = {"type": "message", "role": "user", "content": [part]}
    given = [{"role": "system", "content": "a"}, *items_as_messages([item, item], 1)]
    told = {"role": "user", "content": "a", "images": ["AAAA", "AAAA"]}
    given += [_message(told, "messages[0]", sees=True), _message(told, "", sees=True)]
    _, sources = marked(plain_messages(given))
    assert [where for where, _ in sources] == [
        "earlier[0].content[0].image_url", "input[0].content[0].image_url",
        "messages[0].images[0]", "messages[0].images[1]", "images[0]", "images[1]",
    ]  # fmt: skip


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
