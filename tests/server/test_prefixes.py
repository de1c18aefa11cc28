"""Prompts that are saved to files, and come back in a server that never computed them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

pytest.importorskip("fastapi")

from mlcpipe import Engine
from tests.server.conftest import Running, running_server

pytestmark = pytest.mark.full
TEXT = "A compiler turns a model into a program. " * 12
KV, RESPONSES = "/v1/kv", "/v1/responses"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved") / "prefixes"


@pytest.fixture(scope="module")
def kept(folder: Path) -> list[object]:
    return ["--prefixes", folder, "--responses-store", folder.parent / "responses.sqlite"]


@pytest.fixture(scope="module")
def server(demo_bundle: Path, kept: list[object]) -> Iterator[Running]:
    with running_server(demo_bundle, *kept, "--sequences", 2, "--threads", 1) as running:
        yield running


def post(server: Running, path: str, **body: Any) -> Any:
    return httpx2.post(server.url + path, json=body, timeout=60)


def answer(server: Running, **more: Any) -> tuple[str, int]:
    """A greedy answer, and how many tokens of its prompt were not computed."""
    body = {"prompt": TEXT, "max_tokens": 24, "temperature": 0, "ignore_eos": True, "deterministic": True, **more}
    found = post(server, "/v1/completions", **body).json()
    return found["choices"][0]["text"], found["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_keys_are_walls(demo_bundle: Path, tmp_path: Path) -> None:
    """One key learns nothing of another one's prompts, and what is saved is for the server's user alone."""
    keys, warm = ("--api-key", "A", "--api-key", "B"), tmp_path / "system.txt"
    warm.write_text(TEXT)
    tmp_path.chmod(0o755)
    with running_server(demo_bundle, "--prefixes", tmp_path, *keys, "--warm", warm, "--threads", 1) as running:

        def ask(key: str, path: str, *, method: str = "POST", **body: Any) -> Any:
            headers = {"Authorization": f"Bearer {key}"}
            return httpx2.request(method, running.url + path, json=body or None, headers=headers, timeout=60)

        def cached(key: str, **body: Any) -> int:
            usage = ask(key, "/v1/chat/completions", max_tokens=1, **body).json()["usage"]
            return int(usage["prompt_tokens_details"]["cached_tokens"])

        system = [{"role": "system", "content": TEXT}, {"role": "user", "content": "Hello"}]
        assert cached("A", messages=system) == cached("B", messages=system) > 0
        asked = [{"role": "user", "content": TEXT[::-1]}]
        assert [cached(key, messages=asked) > 16 for key in "ABAB"] == [False, False, True, True]
        assert ask("A", KV + "/save", name="first", prompt=TEXT).status_code == 200
        (saved,) = tmp_path.rglob("*.prefix")
        assert saved.stat().st_mode & 0o77 == saved.parent.stat().st_mode & 0o77 == 0
        assert ask("B", KV, method="GET").json()["data"] == []
        assert ask("B", KV + "/restore", name="first").status_code == 404
        assert ask("B", KV + "/save", name="first", prompt=TEXT[::-1]).status_code == 200
        assert ask("B", KV + "/first", method="DELETE").status_code == 200
        assert ask("A", KV + "/restore", name="first").status_code == 200
        assert [one["id"] for one in ask("A", KV, method="GET").json()["data"]] == ["first"]


def test_what_is_kept_outlives_a_server_that_is_killed(
    server: Running, demo_bundle: Path, folder: Path, kept: list[object], demo: Engine
) -> None:
    """A saved prompt, which Python's engine reads too, and a response: both of another server at the same time."""
    saved = post(server, KV + "/save", name="notes", prompt=TEXT)
    assert saved.status_code == 200, saved.text
    tokens, nbytes = saved.json()["tokens"], saved.json()["bytes"]
    assert tokens % 16 == 0 and (folder / "notes.prefix").stat().st_size == nbytes
    assert (folder / "notes.prefix").stat().st_mode & 0o77 == 0
    assert (folder.stat().st_mode & 0o77) == 0
    expected, cached = answer(server)
    assert cached == tokens
    with running_server(demo_bundle, *kept, "--sequences", 2, "--threads", 1) as other:
        assert [one["id"] for one in httpx2.get(other.url + KV).json()["data"]] == ["notes"]
        restored = post(other, KV + "/restore", name="notes").json()
        assert restored["tokens"] == tokens
        assert answer(other) == (expected, tokens)
        said = post(other, RESPONSES, input="Hello", max_output_tokens=4).json()
        other.end(number=signal.SIGKILL)
    assert httpx2.get(f"{server.url}{RESPONSES}/{said['id']}").json() == said
    more = post(server, RESPONSES, input="And now?", max_output_tokens=4, previous_response_id=said["id"]).json()
    assert more["usage"]["input_tokens"] > said["usage"]["input_tokens"] + said["usage"]["output_tokens"]
    assert httpx2.delete(f"{server.url}{RESPONSES}/{said['id']}").json()["deleted"]
    assert httpx2.get(f"{server.url}{RESPONSES}/{said['id']}").status_code == 404
    demo.load(folder / "notes.prefix")
    ids = demo.tokenizer.encode(TEXT, add_special_tokens=True)
    assert demo.generate(ids, max_tokens=1).stats.cached_tokens == tokens


def test_a_prompt_with_a_salt_is_for_those_who_know_it(server: Running) -> None:
    messages = [{"role": "system", "content": TEXT}, {"role": "user", "content": "Hello"}]
    assert post(server, KV + "/save", name="mine", messages=messages, cache_salt="s").status_code == 200
    for salt in ("", "t"):
        refused = post(server, KV + "/restore", name="mine", cache_salt=salt)
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "prefix_not_found")
    assert post(server, KV + "/restore", name="mine", cache_salt="s").status_code == 200
    assert httpx2.delete(server.url + KV + "/mine").json()["deleted"]
    assert httpx2.delete(server.url + KV + "/mine").status_code == 404


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": TEXT},
        {"name": "a"},
        {"name": "a", "prompt": "short"},
        {"name": "a", "prompt": TEXT * 100},
        {"name": "../a", "prompt": TEXT},
        {"name": ".a", "prompt": TEXT},
        {"name": "a" * 65, "prompt": TEXT},
        {"name": 5, "prompt": TEXT},
    ],
)
def test_what_cannot_be_saved_is_refused(body: dict[str, Any], server: Running, folder: Path) -> None:
    before = sorted(folder.iterdir())
    assert post(server, KV + "/save", **body).status_code == 400
    assert sorted(folder.iterdir()) == before


def test_a_wrong_name_is_refused_before_the_prompt_is_computed(server: Running) -> None:
    prompt = "Nobody asked this before. " * 20
    assert post(server, KV + "/save", name="a/b", prompt=prompt).status_code == 400
    assert answer(server, prompt=prompt, max_tokens=1)[1] == 0


def test_a_file_that_was_changed_is_refused(server: Running, folder: Path) -> None:
    assert post(server, KV + "/save", name="whole", prompt=TEXT).status_code == 200
    data = (folder / "whole.prefix").read_bytes()
    for name, changed in {
        "byte": data[:-100] + bytes([data[-100] ^ 1]) + data[-99:],
        "short": data[:-1],
        "empty": b"",
        "other": b"text",
    }.items():
        (folder / f"{name}.prefix").write_bytes(changed)
        refused = post(server, KV + "/restore", name=name)
        assert refused.status_code == 400, refused.text
        assert "Traceback" not in refused.text
        assert post(server, KV + "/restore", name="whole").status_code == 200
        (folder / f"{name}.prefix").unlink()


def test_a_prefix_without_room_is_refused(demo_bundle: Path, folder: Path, server: Running) -> None:
    """A running prompt has all pages; restored pages are evicted for prompts."""
    assert post(server, KV + "/save", name="room", prompt=TEXT).status_code == 200
    with running_server(demo_bundle, "--prefixes", folder, "--sequences", 1, "--threads", 1, "--context", 512) as other:
        body = {"prompt": "word " * 300, "max_tokens": 200, "ignore_eos": True, "stream": True}
        with httpx2.stream("POST", other.url + "/v1/completions", json=body, timeout=60) as stream:
            next(stream.iter_lines())
            refused = post(other, KV + "/restore", name="room")
            assert refused.status_code in (200, 503), refused.text  # 200 where the answer was faster
        assert post(other, KV + "/restore", name="room").status_code == 200
        assert answer(other, max_tokens=4)[1] > 0
        assert answer(other, prompt="other " * 60, max_tokens=4)[1] == 0


def test_without_a_folder_nothing_is_saved(demo_bundle: Path, tmp_path: Path) -> None:
    """And `--warm` computes system messages first."""
    file = tmp_path / "system.txt"
    file.write_text(TEXT)
    with running_server(demo_bundle, "--sequences", 2, "--threads", 1, "--warm", file) as warm:
        refused = post(warm, KV + "/save", name="a", prompt=TEXT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "not_enabled")
        messages = [{"role": "system", "content": TEXT}, {"role": "user", "content": "Hello"}]
        usage = post(warm, "/v1/chat/completions", messages=messages, max_tokens=4).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > 100
