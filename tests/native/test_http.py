"""Requests of HTTP that the native server reads: any bytes give requests or refusals, however they arrive."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.native.cxx import RUNTIME, SANITIZED, Cxx

CLI, TEXT = RUNTIME / "cli", sorted((RUNTIME / "text").glob("*.cc"))
READER = [Path(__file__).with_name("http_fuzz.cc"), CLI / "http.cc"]
BODIES = [*READER, *sorted(CLI.glob("openai_*.cc")), *TEXT]
CHAT = {
    "messages": [
        {"role": "system", "content": "Be short."},
        {"role": "developer", "content": [{"type": "text", "text": "é"}]},
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": '{"a": [1, 2.5]}'}}],
        },
        {"role": "tool", "content": "x", "tool_call_id": "1"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "stop": ["\n\n", "END"],
    "logit_bias": {"5": -100, "7": 1.5},
    "temperature": 0.5,
    "seed": 7,
    "max_tokens": 16,
    "stream": True,
    "stream_options": {"include_usage": True},
    "chat_template_kwargs": {"x": None},
}


def post(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", *(headers or [f"Content-Length: {len(body)}"])]
    return "\r\n".join([*lines, "", ""]).encode() + body


def chunks(body: bytes, size: int) -> bytes:
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x;name=value\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\nTrailer: x\r\n\r\n"


def requests(folder: Path) -> list[str]:
    """Files with one request or more."""
    chat, text = json.dumps(CHAT).encode(), json.dumps({"prompt": "A compiler", "stop": "x"}).encode()
    get = b"GET /v1/models/a%2Fb?x=1 HTTP/1.1\r\nHost: localhost:8000\r\nAuthorization: Bearer key\r\n\r\n"
    files = {
        "chat": post("/v1/chat/completions", chat),
        "chunked": post("/v1/chat/completions", chunks(chat, 50), "Transfer-Encoding: chunked", "Expect: 100-continue"),
        "several": get + post("/v1/completions", text) + get + get,
        "old": b"GET /health HTTP/1.0\r\n\r\n",
    }
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return [str(folder / name) for name in files]


def changed(program: Path, folder: Path, count: int, seed: int) -> list[int]:
    """Changes requests and reads them -> the numbers of requests, refusals and bodies that can be answered."""
    words = [str(program), str(count), str(seed), *requests(folder)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return list(map(int, done.stdout.split()))


def test_hundreds_of_changed_requests_are_read_or_refused(cxx: Cxx, tmp_path: Path) -> None:
    read, refused, _ = changed(cxx.program(READER, *SANITIZED), tmp_path, 250, 1)
    assert read > 200 and refused > 200


@pytest.mark.full
def test_many_changed_bodies_are_read_or_refused(cxx: Cxx, tmp_path: Path) -> None:
    read, refused, bodies = changed(cxx.program(BODIES, *SANITIZED, "-DMLCPIPE_BODIES"), tmp_path, 500, 2)
    assert read > 300 and refused > 300 and 30 < bodies < read


@pytest.mark.everything
def test_millions_of_changed_requests_are_read_or_refused(cxx: Cxx, tmp_path: Path) -> None:
    read, refused, bodies = changed(cxx.program(BODIES, *SANITIZED, "-DMLCPIPE_BODIES"), tmp_path, 500_000, 3)
    assert read > 300_000 and refused > 300_000 and bodies > 30_000
