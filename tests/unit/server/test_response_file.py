"""Stored responses in a file: over restarts and kills, of several servers, and what is refused."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

pytest.importorskip("fastapi")

from mlcpipe.errors import UsageError
from mlcpipe.server import response_file
from mlcpipe.server.guard import Rules
from mlcpipe.server.response_file import ResponseFile
from tests.unit.server.fake_engine import FakeEngine, answers, with_client

PATH = "/v1/responses"
WRITER = """
import sys
from pathlib import Path
from mlcpipe.server.response_file import ResponseFile
store = ResponseFile(Path(sys.argv[1]))
for number in range(3000):
    response = {"id": str(number), "previous_response_id": str(number - 1) if number else None, "output": []}
    store._at_once(lambda each: each.add("", response, [{"id": f"i{number}", "content": "x" * 9999}], 10000))
    print(number, flush=True)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "responses.sqlite"


@pytest.fixture
def opened(path: Path) -> Iterator[Callable[..., ResponseFile]]:
    """Opens the file as another server does."""
    made: list[ResponseFile] = []

    def one(**bounds: int) -> ResponseFile:
        made.append(ResponseFile(path, **bounds))
        return made[-1]

    yield one
    for store in made:
        store.close()


def say(store: ResponseFile, text: str, engine: FakeEngine, **more: Any) -> dict[str, Any]:
    (answer,) = answers(engine, (PATH, {"input": text, **more}), store=store)
    assert answer.status_code == 200, answer.text
    made: dict[str, Any] = answer.json()
    return made


def test_a_server_that_starts_again_continues_and_deletes(path: Path, opened: Callable[..., ResponseFile]) -> None:
    engine, before = FakeEngine("One"), ResponseFile(path)
    first = say(before, "Count", engine)
    before.close()
    assert [one.name for one in path.parent.iterdir()] == [path.name]  # whole without its log
    store = opened()
    assert answers(engine, (f"{PATH}/{first['id']}", None), store=store)[0].json() == first
    second = say(store, "More", engine, previous_response_id=first["id"])
    whole = [{"role": "user", "content": "Count"}, {"role": "assistant", "content": "One"}]
    say(store, "", engine, input=[*whole, {"role": "user", "content": "More"}])
    assert engine.asked[1].tokens == engine.asked[2].tokens

    async def delete(client: httpx2.AsyncClient) -> list[int]:
        asked = [await client.delete(f"{PATH}/{first['id']}") for _ in range(2)]
        return [one.status_code for one in asked]

    assert with_client(engine, delete, store=store) == [200, 404]
    again = {"input": "a", "previous_response_id": second["id"]}
    assert answers(engine, (PATH, again), store=opened())[0].status_code == 404


def test_servers_share_a_file(opened: Callable[..., ResponseFile]) -> None:
    one, other = opened(most=3), opened(most=3)
    names = [say(store, "a", FakeEngine())["id"] for store in (one, other, one, other)]
    for store in (one, other):
        assert [store.has("", name) for name in names] == [False, True, True, True]
    other.delete("", names[1])
    assert answers(FakeEngine(), (f"{PATH}/{names[1]}", None), store=one)[0].status_code == 404


def test_each_key_has_its_own(path: Path, opened: Callable[..., ResponseFile]) -> None:
    def ask(key: str, where: str, body: Any, store: ResponseFile) -> Any:
        headers = {"authorization": f"Bearer {key}"}
        return answers(FakeEngine(), (where, body), headers=headers, rules=Rules(keys=["k", "l"]), store=store)[0]

    name = ask("k", PATH, {"input": "a"}, opened()).json()["id"]
    store = opened()
    assert [ask(key, f"{PATH}/{name}", None, store).status_code for key in "kl"] == [200, 404]
    assert answers(FakeEngine(), (f"{PATH}/{name}", None), store=store)[0].status_code == 404


def test_nothing_that_was_kept_is_lost_when_the_process_is_killed(path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        said = [next(writer.stdout) for _ in range(30)]
        writer.kill()
        said += writer.stdout
    store = ResponseFile(path)
    items, _ = store.history("", said[-1].strip(), 4096)
    store.close()
    assert [one["id"] for one in items] == [f"i{number}" for number in range(len(said))]


def test_the_file_is_its_owner_s_and_forgets(path: Path) -> None:
    store = ResponseFile(path)
    name = say(store, "a secret word", FakeEngine())["id"]
    assert {one.stat().st_mode & 0o777 for one in path.parent.iterdir()} == {0o600}
    store._at_once(lambda each: each.delete("", name))
    store.close()
    assert b"secret" not in path.read_bytes() and path.stat().st_size > 0


def foreign(path: Path) -> None:
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE bookmarks (url TEXT)")
    db.close()


def later(path: Path) -> None:
    ResponseFile(path).close()
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version = 2")
    db.close()


def triggered(path: Path) -> None:
    ResponseFile(path).close()
    db = sqlite3.connect(path)
    db.execute("CREATE TRIGGER t AFTER INSERT ON responses BEGIN DELETE FROM contents; END")
    db.close()


def damaged(path: Path) -> None:
    store = ResponseFile(path)
    for number in range(40):
        store.add("", {"id": f"{number}", "previous_response_id": None, "output": []}, [{"a": "x" * 3000}], 3000)
    store.close()
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] + bytes(4096) * 4 + data[len(data) // 2 + 4 * 4096 :])


@pytest.mark.parametrize(
    "made, said",
    [
        (foreign, "another program's database"),
        (later, "expected version 1; found version 2"),
        (triggered, "other tables"),
        (damaged, "found damage"),
        (lambda path: path.write_bytes(b"a text" * 1000), "file is not a database"),
        (lambda path: path.mkdir(), "no regular file"),
    ],
)
def test_other_files_are_refused_and_stay(made: Callable[[Path], object], said: str, path: Path) -> None:
    made(path)
    if path.is_file():
        path.chmod(0o600)
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(UsageError, match=said) as refused:
        ResponseFile(path)
    assert str(path) in str(refused.value) and "name another" in str(refused.value)
    assert before is None or (path.read_bytes() == before and [*path.parent.iterdir()] == [path])


def test_places_that_others_read_are_refused(path: Path) -> None:
    ResponseFile(path).close()
    path.chmod(0o640)
    with pytest.raises(UsageError, match="found mode 0640; chmod 600"):
        ResponseFile(path)
    with pytest.raises(UsageError, match="No such file"):
        ResponseFile(path.parent / "absent" / "file")


def test_a_file_in_use_delays_nothing_else_and_answers_come(path: Path, opened: Callable[..., ResponseFile]) -> None:
    store, other = opened(), sqlite3.connect(path, isolation_level=None)
    engine = FakeEngine()

    async def work(client: httpx2.AsyncClient) -> dict[str, Any]:
        other.execute("BEGIN IMMEDIATE")
        waits = asyncio.ensure_future(client.post(PATH, json={"input": "a"}))
        for _ in range(20):
            assert (await client.get("/health")).status_code == 200
        assert not waits.done()
        other.execute("COMMIT")
        made: dict[str, Any] = (await waits).json()
        return made

    made = with_client(engine, work, store=store)
    assert made["store"] and store.has("", made["id"])
    other.close()


def test_two_clients_that_cancel_get_one_end(path: Path, opened: Callable[..., ResponseFile]) -> None:
    """Which is being stored when the second one comes."""
    store, other = opened(), sqlite3.connect(path, isolation_level=None)

    async def cancelled(client: httpx2.AsyncClient) -> list[Any]:
        name = (await client.post(PATH, json={"input": "a", "background": True})).json()["id"]
        other.execute("BEGIN IMMEDIATE")
        both = [asyncio.ensure_future(client.post(f"{PATH}/{name}/cancel")) for _ in range(2)]
        for _ in range(20):
            await client.get("/health")
        assert not any(one.done() for one in both)
        other.execute("COMMIT")
        return [*(await asyncio.gather(*both)), store._at_once(lambda each: each.get("", name)).response]

    one, two, kept = with_client(FakeEngine(ends=False), cancelled, store=store)
    assert one.json()["status"] == two.json()["status"] == kept["status"] == "cancelled"
    other.close()


def test_what_fails_later_is_said(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer comes all the same, and says that it is not stored."""
    monkeypatch.setattr(response_file, "BUSY_S", 0.01)
    store, other, engine = ResponseFile(path), sqlite3.connect(path, isolation_level=None), FakeEngine()
    made = say(store, "a", engine)

    async def work(client: httpx2.AsyncClient) -> list[Any]:
        other.execute("BEGIN IMMEDIATE")
        told = [await client.get(f"{PATH}/{made['id']}"), await client.post(PATH, json={"input": "b"})]
        other.execute("UPDATE contents SET items = 'no JSON'")
        other.execute("COMMIT")
        told.append(await client.get(f"{PATH}/{made['id']}"))
        told.append(await client.delete(f"{PATH}/{made['id']}"))
        return told

    busy, answered, broken, deleted = with_client(engine, work, store=store)
    assert (busy.status_code, busy.headers["retry-after"]) == (503, "1") and "locked" in busy.text
    assert broken.status_code == 503 and "response 1 is damaged; delete it" in broken.text
    assert answered.status_code == deleted.status_code == 200
    assert answered.json()["output"][0]["content"][0]["text"] == "Hello" and answered.json()["store"] is False
    other.close()
    store.close()
