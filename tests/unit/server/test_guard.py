"""Who may ask what: pages of other sites, clients of other keys, folders of adapters."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from mlcpipe.errors import UsageError
from mlcpipe.server import guard
from mlcpipe.server.errors import ApiError
from mlcpipe.server.guard import Rules, is_loopback, namespace_of
from mlcpipe.server.prefix_store import PrefixStore
from tests.unit.server.fake_engine import FakeEngine, answers

CHAT, LOAD = "/v1/chat/completions", "/v1/load_lora_adapter"
SHORT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1", True),
        ("127.0.0.2", True),
        ("127.255.255.255", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("::1%lo", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.168.1.5", False),
        ("128.0.0.1", False),
        ("::ffff:10.0.0.1", False),
        ("localhost", False),
        ("", False),
    ],
)
def test_loopback_is_told_by_the_address(address: str, expected: bool) -> None:
    assert is_loopback(address) is expected


LOCAL, NETWORK = Rules(host="127.0.0.2"), Rules(host="0", loopback=False)


@pytest.mark.parametrize(
    ("rules", "host", "origin", "status"),
    [
        (LOCAL, "127.0.0.2:8000", None, 200),
        (LOCAL, "127.1.2.3", None, 200),
        (LOCAL, "LOCALHOST:1", None, 200),
        (LOCAL, "[::1]:8000", "http://[::1]:8000", 200),
        (LOCAL, "evil.example", None, 421),
        (LOCAL, "127.0.0.2.evil.example", None, 421),
        (LOCAL, "0.0.0.0", None, 421),
        (LOCAL, "evil.example@127.0.0.2", None, 421),
        (LOCAL, "127.0.0.2#evil.example", None, 421),
        (LOCAL, "[::1]evil.example", None, 421),
        (LOCAL, "[::FFFF:127.0.0.1]:8000", None, 200),
        (LOCAL, "127.0.0.2", "https://evil.example http://127.0.0.2", 403),
        (LOCAL, "127.0.0.2:8000", "https://evil.example", 403),
        (LOCAL, "127.0.0.2:8000", "null", 403),
        (LOCAL, "127.0.0.2:8000", "http://127.0.0.2:8001", 403),
        (Rules(host="MyBox"), "mybox:8000", None, 200),
        (Rules(["k"]), "127.0.0.1", "https://evil.example", 403),
        (NETWORK, "box.example", None, 421),
        (NETWORK, socket.gethostname(), None, 200),
        (NETWORK, "localhost", None, 200),
        (Rules(host="0", loopback=False, hosts=["Box.example"]), "box.example:80", "http://box.example:80", 200),
        (Rules(hosts=["host.docker.internal"]), "host.docker.internal:8000", None, 200),
        (Rules(origins=["app://obsidian.md", "http://localhost:*"]), "127.0.0.1", "app://obsidian.md", 200),
        (Rules(origins=["app://obsidian.md", "http://localhost:*"]), "127.0.0.1", "http://localhost:3000", 200),
        (Rules(origins=["app://obsidian.md", "http://localhost:*"]), "127.0.0.1", "http://localhost.evil", 403),
        (Rules(origins=["app://obsidian.md"]), "127.0.0.1", "app://obsidianxmd", 403),
        (Rules(origins=["https://Box.example:443/"]), "127.0.0.1", "https://box.example", 200),
        (Rules(origins=["*"]), "127.0.0.1", "https://any.example", 200),
        (NETWORK, "192.168.1.5:8000", "http://192.168.1.5:8000", 200),
        (NETWORK, "192.168.1.5:8000", "https://evil.example", 403),
        (NETWORK, "192.168.1.5:8000", "null", 403),
        (Rules(["k"], loopback=False), "box.local", "https://app.example", 200),
    ],
)
@pytest.mark.parametrize("path", ["/health", CHAT])
def test_pages_of_other_sites_are_refused(rules: Rules, host: str, origin: str | None, status: int, path: str) -> None:
    headers = [("host", host), ("x-api-key", "k"), ("content-type", "text/plain")]
    headers += [("origin", one) for one in (origin or "").split()]
    (answer,) = answers(FakeEngine(), (path, None if path == "/health" else SHORT), headers=headers, rules=rules)
    assert answer.status_code == status


@pytest.mark.parametrize(
    "path", ["/chat/completions", "http://127.0.0.1//v1/chat/completions", "/v1//chat/completions", CHAT]
)
def test_a_base_url_may_lack_v1(path: str) -> None:
    (answer,) = answers(FakeEngine(), (path, SHORT))
    assert answer.status_code == 200 and answer.json()["object"] == "chat.completion"


def namespaces(rules: Rules, *asked: tuple[str, str]) -> list[str]:
    """Of requests with a key and a salt."""
    engine = FakeEngine()
    for key, salt in asked:
        body = {**SHORT, "cache_salt": salt, "owner": "x", "_owner": "x", "namespace": "x"}
        (answer,) = answers(engine, (CHAT, body), headers={"x-api-key": key}, rules=rules)
        assert answer.status_code == 200
    return [request.namespace for request in engine.asked]


ASKED = ("A", ""), ("B", ""), ("A", "s"), ("B", "s")


def test_keys_share_no_prompts() -> None:
    a, b, a_salted, b_salted = found = namespaces(Rules(["A", "B"]), *ASKED)
    assert len(set(found)) == 4 and "" not in found
    assert namespaces(Rules(["B", "A", "C"]), *ASKED) == found
    assert {a, b} == {namespace_of(owner) for owner in Rules(["A", "B"]).owners.values()}
    long = namespaces(Rules(["A"]), ("A", "s" * 100_000))[0]
    assert len(long) == len(a_salted) == len(b_salted) == 64


@pytest.mark.parametrize("rules", [Rules(), Rules(["A"]), Rules(["A", "A"]), Rules(["A", "B"], shares_prompts=True)])
def test_one_party_shares_its_prompts(rules: Rules) -> None:
    keys = [key if key in rules.keys or not rules.keys else "A" for key, _ in ASKED]
    a, b, a_salted, b_salted = namespaces(rules, *((key, salt) for key, (_, salt) in zip(keys, ASKED)))
    assert a == b == "" != a_salted == b_salted


def test_each_key_has_its_own_saved_prompts(tmp_path: Path) -> None:
    whole = PrefixStore(tmp_path, None, 16)  # type: ignore[arg-type]
    one, other = (whole.of(owner) for owner in Rules(["A", "B"]).owners.values())
    assert whole.of("") is whole
    for store, text in ((one, "1"), (whole, "3")):
        store.folder.mkdir(exist_ok=True)
        store.path("first").write_text(text)
    assert [list(store.names()) for store in (one, other, whole)] == [["first"], [], ["first"]]
    for act in (lambda: other.delete("first"), lambda: other.read("first", "")):
        with pytest.raises(ApiError, match="no saved prefix"):
            act()
    assert one.path("first").read_text() == "1"


def test_long_bodies_of_all_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    body = {**SHORT, "user": "a" * 100_000}
    assert [one.status_code for one in answers(FakeEngine(), (CHAT, body), (CHAT, body))] == [200, 200]
    monkeypatch.setattr(guard, "MAX_HELD_BYTES", 90_000)
    long, short = answers(FakeEngine(), (CHAT, body), (CHAT, SHORT))
    assert (long.status_code, short.status_code) == (503, 200)


class WithAdapters(FakeEngine):
    """It takes adapters or not; what it reads is no adapter."""

    takes = True

    def check_adapters(self) -> None:
        if not self.takes:
            raise UsageError("the engine takes no adapters")

    def read_adapter(self, folder: Path, name: str) -> Any:
        raise UsageError(f"{folder} was read")


def refusals(engine: FakeEngine, rules: Rules, *paths: object) -> set[tuple[int, str]]:
    asked = [(LOAD, {"lora_name": "x", "lora_path": str(path)}) for path in paths]
    found = answers(engine, *asked, headers={"x-api-key": "k"}, rules=rules)
    return {(one.status_code, one.json()["error"]["message"]) for one in found}


def test_a_folder_that_may_not_be_read_is_like_none(tmp_path: Path) -> None:
    for name in ("in/one", "out"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "adapter_config.json").write_text("{}")
    (tmp_path / "in" / "link").symlink_to(tmp_path / "out")
    nothing = ["/etc", "/nonexistent", "~root", "~root/.ssh", "hf://a/b", "a\0b", "a" * 5000, "", "/proc/1/root"]
    some = Rules(["k"], adapter_folders=[tmp_path / "in"])
    hidden = [tmp_path / "out", tmp_path / "in" / "link", tmp_path / "in", f"{tmp_path}/in/one/../../out"]
    assert len(refusals(WithAdapters(), some, *nothing, *hidden)) == 1
    assert refusals(WithAdapters(), Rules(["k"]), *nothing) == refusals(WithAdapters(), some, "/etc")
    read = [tmp_path / "in" / "one", f"{tmp_path}/out/../in/one"]
    assert refusals(WithAdapters(), some, *read) == {(400, f"{tmp_path}/in/one was read")}
    assert refusals(WithAdapters(), Rules(["k"]), tmp_path / "out") == {(400, f"{tmp_path}/out was read")}


def test_a_server_without_adapters_looks_at_no_folder(tmp_path: Path) -> None:
    engine = WithAdapters()
    engine.takes = False
    (tmp_path / "adapter_config.json").write_text("{}")
    assert refusals(engine, Rules(["k"]), tmp_path, "/nonexistent") == {(400, "the engine takes no adapters")}
