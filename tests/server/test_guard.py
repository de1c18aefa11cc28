"""Who may ask, and how much: keys, hosts, sizes, queues, disconnects, the end of a server."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest

pytest.importorskip("fastapi")

from tests.server.conftest import Running, running_server

HELLO = [{"role": "user", "content": "Hello"}]
LONG = {"messages": HELLO, "ignore_eos": True, "stream": True, "max_tokens": 1900}
SHORT = {"messages": HELLO, "max_tokens": 1}
CHAT = "/v1/chat/completions"
KEY = "sécret"


@pytest.fixture(scope="module")
def guarded(demo_bundle: Path) -> Iterator[Running]:
    """With a key, a queue of one, and two requests at once for each key."""
    with running_server(demo_bundle, "--api-key", KEY, "--max-queue", 1, "--max-per-key", 2, "--threads", 2) as running:
        yield running


def test_what_fits_is_said_and_ctrl_c_ends_a_server(demo_bundle: Path) -> None:
    with running_server(demo_bundle, "--sequences", 3, "--context", 512, "--host", "0.0.0.0", "--no-key") as server:
        said = "".join(server.lines)
        assert "the KV cache holds 3 x 512 tokens" in said
        assert "warning: everybody who reaches 0.0.0.0 may use the model" in said
        assert server.end(number=signal.SIGINT) == 130
        assert not any("Traceback" in line for line in server.lines)


EXTENSION = {"origin": "chrome-extension://abc"}


def test_pages_that_are_allowed_ask_over_tls(demo_bundle: Path, certificate: tuple[Path, Path]) -> None:
    """A browser asks first, without the key; it reads refusals as well."""
    options = ("--api-key", KEY, "--tls-cert", certificate[0], "--tls-key", certificate[1])
    with running_server(demo_bundle, *options, "--allow-origin", "chrome-extension://*", "--threads", 1) as server:
        assert server.url.startswith("https://")
        asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        with httpx2.Client(base_url=server.url, verify=ssl.create_default_context(cafile=certificate[0])) as client:
            first = client.options(CHAT, headers={**EXTENSION, **asked})
            assert first.status_code == 200 and "authorization" in first.headers["access-control-allow-headers"]
            refused = client.post(CHAT, json=SHORT, headers=EXTENSION)
            answer = client.post(CHAT, json=SHORT, headers={**EXTENSION, "x-api-key": KEY.encode()})
            evil = client.post(CHAT, json=SHORT, headers={"origin": "https://evil.example", "x-api-key": KEY.encode()})
    assert [one.status_code for one in (refused, answer, evil)] == [401, 200, 403]
    named = [one.headers.get("access-control-allow-origin") for one in (first, refused, answer, evil)]
    assert named == [*[EXTENSION["origin"]] * 3, None]


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """Self-signed, of 127.0.0.1."""
    if (openssl := shutil.which("openssl")) is None:
        pytest.skip("no openssl")
    pair = tmp_path / "cert.pem", tmp_path / "key.pem"
    words = "req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1"
    subprocess.run([openssl, *words.split(), "-out", pair[0], "-keyout", pair[1]], check=True, capture_output=True)
    return pair


def metric(client: httpx2.Client, name: str) -> float:
    lines = [line for line in client.get("/metrics").text.splitlines() if line.startswith(f"{name} ")]
    return float(lines[0].split()[1]) if lines else 0.0


@contextmanager
def raw_request(client: httpx2.Client, body: bytes, *, length: int | None = None) -> Iterator[socket.socket]:
    """A connection over which a request went, which may announce another length than it has."""
    address = urlsplit(str(client.base_url))
    length = len(body) if length is None else length
    head = f"POST {CHAT} HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Length: {length}\r\n\r\n"
    with socket.create_connection((address.hostname or "", address.port or 0), timeout=20) as raw:
        raw.sendall(head.encode() + body)
        yield raw


def wait_until(
    client: httpx2.Client, *, busy: bool, within_s: float = 20, names: tuple[str, ...] = ("running", "waiting")
) -> None:
    end = time.monotonic() + within_s
    while any(metric(client, f"mlcpipe_num_requests_{name}") for name in names) != busy:
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/status", "/openapi.json", "/v1/nothing"])
def test_every_path_but_health_wants_the_key(guarded: Running, path: str) -> None:
    wrong = [{}, {"authorization": "Bearer secret"}, {"authorization": KEY.encode()}, {"x-api-key": ""}]
    assert [httpx2.get(guarded.url + path, headers=one).status_code for one in wrong] == [401] * len(wrong)
    right = [{"authorization": f"Bearer {KEY}".encode()}, {"x-api-key": KEY.encode()}, {"api-key": KEY.encode()}]
    assert all(httpx2.get(guarded.url + path, headers=one).status_code != 401 for one in right)


def test_health_is_open(guarded: Running) -> None:
    for path in ("/health", "/v1/health"):
        answer = httpx2.get(guarded.url + path)
        assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
        head = httpx2.head(guarded.url + path)
        assert (head.status_code, head.content, head.headers["content-length"]) == (200, b"", "15")


def test_pages_of_other_sites_are_refused(client: httpx2.Client, server: Running) -> None:
    own = server.url
    for headers, status in (
        ({"host": "example.com"}, 421),
        ({"host": "127.0.0.1.example.com"}, 421),
        ({"origin": "https://example.com"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://["}, 403),
        ({"origin": own}, 200),
        ({"host": f"localhost:{urlsplit(own).port}"}, 200),
    ):
        answer = client.post(CHAT, json=SHORT, headers=headers)
        assert answer.status_code == status, headers
        assert "access-control-allow-origin" not in answer.headers


def test_a_body_that_is_too_large_is_refused(client: httpx2.Client) -> None:
    def parts() -> Iterator[bytes]:
        for _ in range(33):
            yield b" " * (1 << 20)

    with raw_request(client, b" ", length=33 << 20) as raw:
        assert raw.recv(1000).startswith(b"HTTP/1.1 413")
    try:
        assert client.post(CHAT, content=parts()).status_code == 413
    except httpx2.TransportError:  # the server hung up before it had read all of it
        assert client.post(CHAT, json=SHORT).status_code == 200


def test_a_full_queue_and_a_busy_key_are_refused(guarded: Running) -> None:
    with httpx2.Client(base_url=guarded.url, headers={"x-api-key": KEY.encode()}, timeout=60) as client:
        with ExitStack() as streams:
            for _ in range(2):
                stream = streams.enter_context(client.stream("POST", CHAT, json=LONG))
                assert stream.status_code == 200
                wait_until(
                    client, busy=False, names=("waiting",)
                )  # the next one is not refused because this one has not begun
            third = client.post(CHAT, json=SHORT)
            assert third.status_code == 429
            assert third.json()["error"]["code"] == "rate_limit_exceeded"
            assert int(third.headers["retry-after"]) >= 1
        wait_until(client, busy=False)
        assert client.post(CHAT, json=SHORT).status_code == 200
        many = client.post(CHAT, json={**SHORT, "n": 20})
        assert many.status_code == 503
        assert int(many.headers["retry-after"]) >= 1
        wait_until(client, busy=False)


def test_a_client_that_leaves_stops_its_request(client: httpx2.Client) -> None:
    """Of eight answers, which take seconds together, however slow the machine is at noticing."""
    cancelled = 'mlcpipe_request_success_total{finished_reason="cancelled"}'
    for stream in (True, False):
        wait_until(client, busy=False)
        before = metric(client, cancelled)
        with raw_request(client, json.dumps({**LONG, "n": 8, "stream": stream}).encode()):
            wait_until(client, busy=True)
        wait_until(client, busy=False)
        assert metric(client, cancelled) - before == 8


def test_the_status_says_what_runs(client: httpx2.Client) -> None:
    facts = client.get("/status").json()
    assert facts["context_length"] == 2048
    assert facts["about"]["model_type"] == "llama"


def ended_while_it_answers(running: Running, body: dict[str, Any]) -> list[str]:
    """The lines of a stream, while which the server is told to end."""
    seen: list[str] = []
    begun = threading.Event()

    def read() -> None:
        with httpx2.stream("POST", running.url + CHAT, json=body, timeout=60) as answer:
            for line in answer.iter_lines():
                seen.extend([line] if line else [])
                begun.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(20)
    assert running.end() == 0
    reader.join()
    return seen


@pytest.mark.full
def test_a_server_finishes_what_runs_and_ends(demo_bundle: Path) -> None:
    with running_server(demo_bundle, "--threads", 2) as running:
        assert ended_while_it_answers(running, {**LONG, "max_tokens": 1000})[-1] == "data: [DONE]"
        with pytest.raises(httpx2.TransportError):
            httpx2.get(running.url + "/health")


@pytest.mark.full
def test_what_does_not_finish_in_time_ends_with_an_error(demo_bundle: Path) -> None:
    with running_server(demo_bundle, "--threads", 2, "--drain", 1) as running:
        *_, last, done = ended_while_it_answers(running, {**LONG, "n": 60})
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "cancelled"
        assert done == "data: [DONE]"


def test_lines_about_requests_say_nothing_of_what_they_say(demo_bundle: Path) -> None:
    program = [sys.executable, "-m", "mlcpipe", "serve", demo_bundle, "--port", "0", "--access-log", "json"]
    with subprocess.Popen([*map(str, program)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None and server.stdout is not None
        url = next(found[0] for line in server.stderr if (found := re.search(r"https?://\S+:\d+(?=  \()", line)))
        named = {"x-request-id": "mine"}
        answer = httpx2.post(f"{url}/v1/chat/completions?a=b", json=SHORT, headers=named, timeout=60)
        server.send_signal(signal.SIGTERM)
        out, _ = server.communicate(timeout=60)
    assert (answer.status_code, answer.headers["x-request-id"]) == (200, "mine")
    (line,) = map(json.loads, out.splitlines())
    assert (line["request_id"], line["path"], line["status"]) == ("mine", "/v1/chat/completions", 200)
