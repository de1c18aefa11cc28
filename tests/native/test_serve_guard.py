"""`chat serve` among clients that are hostile, slow, too many, or gone."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

httpx2 = pytest.importorskip("httpx2")

from tests.conftest import Bundles
from tests.server.conftest import Running, running_server

pytestmark = pytest.mark.full  # compiles TVM's runtime
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]
SHORT = {"messages": HELLO, "max_tokens": 1}
# The demo model writes these in about a second.
LONG: dict[str, Any] = {"messages": HELLO, "ignore_eos": True, "max_tokens": 1900, "stream": True}
READ_S = 1.5  # --read-timeout
KEY = "sécret"


@pytest.fixture(scope="module")
def server(program: Path, demo_bundles: Bundles) -> Iterator[Running]:
    words = ("-m", demo_bundles["q4f16_1"], "--threads", 1, "--read-timeout", READ_S, "--max-queue", 2)
    with running_server(*words, program=(program,)) as running:
        yield running


@contextmanager
def connected(server: Running) -> Iterator[socket.socket]:
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname or "", address.port or 0), timeout=20) as made:
        yield made


def sent(server: Running, data: bytes, *, ends: bool = True) -> bytes:
    """What comes back, until the server closes; with `ends`, nothing more goes to it."""
    with connected(server) as made:
        try:
            made.sendall(data)
            if ends:
                made.shutdown(socket.SHUT_WR)
        except OSError:  # it has closed already
            pass
        found = b""
        while part := made.recv(1 << 16):
            found += part
    return found


def posted(body: bytes, *headers: str, path: str = CHAT) -> bytes:
    lines = (f"POST {path} HTTP/1.1", "Host: 127.0.0.1", *(headers or (f"Content-Length: {len(body)}",)))
    return "\r\n".join((*lines, "", "")).encode("latin-1") + body


def chunked(*chunks: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(one), one) for one in (*chunks, b""))


GOOD = json.dumps(SHORT).encode()
HEAD = "GET /health HTTP/1.1\r\nHost: localhost\r\n"
MANY = "x-a: b\r\n"
HOSTILE: dict[str, tuple[bytes, int]] = {
    "cut off in the head": (b"POST /v1/cha", 400),
    "cut off in the body": (posted(GOOD[:-5], f"Content-Length: {len(GOOD)}"), 400),
    "both lengths": (posted(chunked(GOOD), f"Content-Length: {len(GOOD)}", "Transfer-Encoding: chunked"), 400),
    "two lengths": (posted(GOOD, f"Content-Length: {len(GOOD)}", f"Content-Length: {len(GOOD)}"), 400),
    "a list of lengths": (posted(GOOD, f"Content-Length: {len(GOOD)}, {len(GOOD)}"), 400),
    "a signed length": (posted(GOOD, f"Content-Length: +{len(GOOD)}"), 400),
    "a negative length": (posted(GOOD, "Content-Length: -1"), 400),
    "a hexadecimal length": (posted(GOOD, "Content-Length: 0x10"), 400),
    "a huge length": (posted(b"", "Content-Length: 99999999999999999999999"), 413),
    "another coding": (posted(GOOD, "Transfer-Encoding: gzip, chunked"), 501),
    "a space before a colon": (posted(chunked(GOOD), "Transfer-Encoding : chunked"), 400),
    "a continued line": (f"{HEAD}x-a: b\r\n c\r\n\r\n".encode(), 400),
    "a header without a colon": (f"{HEAD}x\r\n\r\n".encode(), 400),
    "a zero in a header": (f"{HEAD}x-a: \0\r\n\r\n".encode(), 400),
    "a lone carriage return": (f"{HEAD}x-a: b\rx-c: d\r\n\r\n".encode(), 400),
    "a bad chunk": (posted(b"zz\r\n", "Transfer-Encoding: chunked"), 400),
    "a chunk with a wrong end": (posted(b"2\r\n{}0\r\n\r\n", "Transfer-Encoding: chunked"), 400),
    "a huge chunk": (posted(b"ffffffffffff\r\n", "Transfer-Encoding: chunked"), 413),
    "2 MiB": (posted(b"x" * (2 << 20)), 413),
    "2 MiB in chunks": (posted(chunked(*[b"x" * 4096] * 512), "Transfer-Encoding: chunked"), 413),
    "a long target": (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 414),
    "a huge header": (f"{HEAD}x-a: {'b' * 40_000}\r\n\r\n".encode(), 431),
    "101 headers": (f"{HEAD}{MANY * 100}\r\n".encode(), 431),
    "no host": (b"GET /health HTTP/1.1\r\n\r\n", 400),
    "two hosts": (f"{HEAD}host: localhost\r\n\r\n".encode(), 400),
    "another version": (b"GET /health HTTP/2.0\r\nHost: localhost\r\n\r\n", 505),
    "no version": (b"GET /health\r\n\r\n", 400),
    "TLS": (bytes.fromhex("16030100a5010000a10303") + b"\r\n\r\n", 400),
    "a broken escape": (b"GET /%zz HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
    "bad UTF-8": (posted(b'{"messages": [{"role": "user", "content": "\xff"}]}'), 400),
    "half a pair of surrogates": (posted(b'{"messages": [{"role": "user", "content": "\\ud800"}]}'), 400),
    "bad JSON": (posted(b'{"messages": '), 400),
    "no JSON": (posted(b""), 400),
    "deep JSON": (posted(b'{"messages": ' + b"[" * 500_000), 400),
    "a huge number": (posted(b'{"messages": [], "seed": 99999999999999999999}'), 400),
    "another host": (b"GET /health HTTP/1.1\r\nHost: evil.example\r\n\r\n", 421),
    "a host that begins like ours": (b"GET /health HTTP/1.1\r\nHost: 127.0.0.1.evil.example\r\n\r\n", 421),
    "4097 messages": (posted(json.dumps({**SHORT, "messages": HELLO * 4097}).encode()), 400),
    "another site's page": (f"{HEAD}Origin: http://evil.example\r\n\r\n".encode(), 403),
    "a method that it does not know": (b"BREW /health HTTP/1.1\r\nHost: [::ffff:7f00:1]:80\r\n\r\n", 405),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_hostile_gets_its_status(name: str, server: Running) -> None:
    data, status = HOSTILE[name]
    found = sent(server, data)
    assert found.startswith(b"HTTP/1.1 %d " % status), found[:300]
    head, _, body = found.partition(b"\r\n\r\n")
    assert json.loads(body)["error"]["message"] and b"content-length: %d\r\n" % len(body) in head + b"\r\n"
    assert httpx2.post(server.url + CHAT, json=SHORT).status_code == 200


def test_a_request_does_not_steer_the_server_s_terminal(server: Running) -> None:
    before = len(server.lines)
    sent(server, b"G\x1b[31mET /\x1b]0;title\x07\xff\xc2\x9b HTTP/1.1\r\nHost: localhost\r\n\r\n")
    deadline = time.monotonic() + 20
    while len(server.lines) == before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.lines[before].startswith("G[31mET /]0;title? 400, ")


def test_a_client_that_sends_slowly_is_cut_off(server: Running) -> None:
    """Whatever it sends in between; one that sends nothing is left without a word."""
    with connected(server) as slow, connected(server) as silent:
        began = time.monotonic()
        slow.settimeout(0.2)
        found = b""
        while not found and time.monotonic() - began < 20:
            try:
                slow.sendall(b"a")
                found = slow.recv(1000)
            except TimeoutError:
                assert httpx2.post(server.url + CHAT, json=SHORT).status_code == 200
        assert found.startswith(b"HTTP/1.1 408 ") and time.monotonic() - began > READ_S
        assert silent.recv(1000) == b""


def test_one_connection_takes_many_requests(server: Running) -> None:
    several = posted(GOOD) + posted(chunked(GOOD[:9], GOOD[9:]), "Transfer-Encoding: Chunked") + HEAD.encode() + b"\r\n"
    found = sent(
        server, several + b"GET /v1/models?x=1 HTTP/1.1\r\nHost: [::1]:80\r\nConnection: a, Close\r\n\r\n", ends=False
    )
    assert found.count(b"HTTP/1.1 200 OK\r\n") == 4 and found.count(b"connection: close") == 1
    with connected(server) as made:
        made.sendall(posted(b"", f"Content-Length: {len(GOOD)}", "Expect: 100-continue"))
        assert made.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        made.sendall(GOOD)
        assert made.recv(1000).startswith(b"HTTP/1.1 200 OK\r\n")
    stream = json.dumps({**LONG, "max_tokens": 3}).encode()
    old = sent(server, posted(stream).replace(b"HTTP/1.1", b"HTTP/1.0"), ends=False)
    assert b"transfer-encoding" not in old and old.endswith(b"data: [DONE]\n\n")


@contextmanager
def streaming(server: Running, **fields: Any) -> Iterator[socket.socket]:
    """A connection whose answer has begun."""
    with connected(server) as made:
        made.sendall(posted(json.dumps({**LONG, **fields}).encode()))
        assert made.recv(100).startswith(b"HTTP/1.1 200 OK\r\n")
        yield made


def answered(server: Running) -> None:
    assert httpx2.post(server.url + CHAT, json=SHORT, timeout=20).status_code == 200


def logged(server: Running, words: str, *, count: int = 1) -> bool:
    """Whether the log comes to have so many lines with these words."""
    end = time.monotonic() + 20
    while time.monotonic() < end and sum(words in line for line in server.lines) < count:
        time.sleep(0.02)
    return sum(words in line for line in server.lines) >= count


def test_a_client_that_leaves_ends_its_answer(server: Running) -> None:
    """Of five that leave, less than half of the tokens are computed."""
    before = sum(" 499, " in line for line in server.lines)
    for _ in range(5):
        with streaming(server):
            pass
        answered(server)
    assert logged(server, " 499, ", count=before + 5)
    tokens = [int(line.split(" 499, ")[1].split(" tokens")[0]) for line in server.lines if " 499, " in line]
    assert sum(tokens[before:]) < 5 * LONG["max_tokens"] / 2


def test_a_client_that_leaves_the_line_is_forgotten(server: Running) -> None:
    """Also while its prompt is computed, and one that waits for a whole answer."""
    before = sum(" 499, " in line for line in server.lines)
    with streaming(server), connected(server) as waits:
        waits.sendall(posted(json.dumps({**LONG, "stream": False}).encode()))
        time.sleep(0.1)
    prompt = [{"role": "user", "content": "word " * 1500}]
    with connected(server) as prefills:
        prefills.sendall(posted(json.dumps({"messages": prompt, "max_tokens": 1}).encode()))
        time.sleep(0.05)
    assert logged(server, " 499, ", count=before + 2)
    answered(server)


def test_too_many_that_wait_get_503(server: Running) -> None:
    """Ten at once, where one is answered and two wait."""
    with ExitStack() as stack:
        waiting = [stack.enter_context(connected(server)) for _ in range(10)]
        for one in waiting:
            one.sendall(posted(json.dumps(LONG).encode()))
        assert httpx2.get(server.url + "/health").status_code == 200
        found = [one.recv(1000) for one in waiting]
    refused = [one for one in found if one.startswith(b"HTTP/1.1 503 ")]
    assert len(refused) >= 4 and sum(one.startswith(b"HTTP/1.1 200 ") for one in found) == 10 - len(refused)
    assert all(b"\r\nretry-after: " in one and b'"code":"overloaded"' in one for one in refused)
    answered(server)


def test_too_many_connections_get_503(server: Running) -> None:
    time.sleep(0.1)  # those of other tests end
    with ExitStack() as stack:
        for _ in range(16):
            stack.enter_context(connected(server))
        time.sleep(0.2)
        refused = sent(server, HEAD.encode() + b"\r\n", ends=False)
        assert refused.startswith(b"HTTP/1.1 503 ") and b"\r\nretry-after: 1\r\n" in refused
        flood = [stack.enter_context(connected(server)) for _ in range(60)]
        assert len(flood) == 60
    time.sleep(0.5)
    answered(server)


@pytest.fixture(scope="module")
def guarded(program: Path, demo_bundles: Bundles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(f"other\n\n{KEY}\n", encoding="utf-8")
    words = ("-m", demo_bundles["q4f16_1"], "--host", "0.0.0.0", "--api-key-file", path, "--json")
    with running_server(*words, program=(program,)) as running:
        yield Running(running.url.replace("0.0.0.0", "127.0.0.1"), running.process, running.lines)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": "Bearer other2"}, 401),
        ({"authorization": "Bearer"}, 401),
        ({"authorization": "Basic other"}, 401),
        ({"authorization": "bearer  other"}, 200),
        ({"authorization": f"Bearer {KEY}".encode()}, 200),
        ({"x-api-key": "other"}, 200),
        ({"x-api-key": "other", "authorization": "Bearer wrong"}, 401),
        ({"x-api-key": "other", "host": "any.example"}, 200),
    ],
)
def test_a_key_is_asked_for(headers: Any, status: int, guarded: Running) -> None:
    found = httpx2.post(guarded.url + CHAT, json=SHORT, headers=headers)
    assert found.status_code == status
    assert status == 200 or (found.json()["error"]["code"], found.headers["www-authenticate"]) == (
        "invalid_api_key",
        "Bearer",
    )
    assert httpx2.get(guarded.url + "/health").status_code == 200
    assert httpx2.get(guarded.url + "/v1/models").status_code == 401
    assert logged(guarded, '"target": "/v1/models", "status": 401, "tokens": 0, "seconds": 0.')
    assert all(json.loads(line)["method"] in ("GET", "POST") for line in guarded.lines[2:])
    assert not any("warning" in line for line in guarded.lines)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_answers_finish(number: signal.Signals, program: Path, demo_bundles: Bundles) -> None:
    with running_server("-m", demo_bundles["q4f16_1"], program=(program,)) as server, streaming(server, max_tokens=1000) as made, \
            connected(server):  # fmt: skip
        server.process.send_signal(number)
        found = b""
        while part := made.recv(1 << 16):
            found += part
        assert b'"finish_reason":"length"' in found and b"data: [DONE]\n\n" in found
        assert server.process.wait(30) == 0


def test_answers_that_take_too_long_are_told(program: Path, demo_bundles: Bundles) -> None:
    """What the network sees of a server without a key, and of one that ends in the middle of answers."""
    words = ("-m", demo_bundles["q4f16_1"], "--host", "0.0.0.0", "--drain", 0)
    with running_server(*words, program=(program,)) as found:
        assert any("everybody who reaches 0.0.0.0 may use the model" in line for line in found.lines) or logged(
            found, "everybody"
        )
        server = Running(found.url.replace("0.0.0.0", "127.0.0.1"), found.process, found.lines)
        for origin, status in (("http://evil.example", b"403"), ("http://any.example", b"200")):
            asked = f"GET /health HTTP/1.1\r\nHost: any.example\r\nOrigin: {origin}\r\n\r\n".encode()
            assert sent(server, asked).startswith(b"HTTP/1.1 " + status)
        with streaming(server) as made, connected(server) as waits:
            waits.sendall(posted(json.dumps({**LONG, "stream": False}).encode()))
            time.sleep(0.2)
            server.process.send_signal(signal.SIGTERM)
            streamed = whole = b""
            while part := made.recv(1 << 16):
                streamed += part
            while part := waits.recv(1 << 16):
                whole += part
        assert server.process.wait(30) == 0
    assert b'"code":"cancelled"' in streamed and streamed.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert whole.startswith(b"HTTP/1.1 503 ") and b'"code":"cancelled"' in whole


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--port", "99999"], "--port; expected 0 to 65535"),
        (["--host", "no.such.host.invalid"], "cannot listen on no.such.host.invalid:8000"),
        (["--port", "0", "--api-key-file", "/nowhere"], "--api-key-file; expected a file with a key"),
        (["--port", "0", "--name", "*"], "--name; expected a name"),
        (["--port", "0", "--max-queue", "0"], "--max-queue; expected a number from 1"),
        (["--port", "0", "--read-timeout", "nan"], "--read-timeout"),
        (["--port", "0", "--seed", "1"], "no effect with serve"),
        (["--port", "0", "-m", "/nowhere"], "no bundle in /nowhere"),
    ],
)
def test_mistakes_are_one_line(options: list[str], words: str, program: Path, demo_bundles: Bundles) -> None:
    command = [str(program), "serve", "-m", str(demo_bundles["q4f16_1"]), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    assert words in done.stderr
