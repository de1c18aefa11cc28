"""Ollama's `/api/copy` and `/api/delete`: names that come and go, and files that only their owner removes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest

pytest.importorskip("fastapi")

from mlcpipe.cli import serve_removal
from mlcpipe.errors import UsageError
from mlcpipe.server.app import create_app
from mlcpipe.server.guard import Rules
from mlcpipe.server.model_pool import ModelPool
from mlcpipe.server.ollama.files import _remove
from mlcpipe.server.service import Facts, Service
from tests.unit.server.fake_engine import FakeEngine, with_client

KEY = {"authorization": "Bearer k"}


async def delete(client: httpx2.AsyncClient, name: str) -> Any:
    return await client.request("DELETE", "/api/delete", json={"model": name})


def test_a_copy_is_another_name_until_it_is_deleted() -> None:
    async def work(client: httpx2.AsyncClient) -> None:
        async def copied(source: str, destination: str) -> int:
            body = {"source": source, "destination": destination}
            return int((await client.post("/api/copy", json=body)).status_code)

        async def said(name: str) -> int:
            return int((await client.post("/api/chat", json={"model": name, "messages": []})).status_code)

        assert await copied("demo", "mine:latest") == 200 and await said("mine") == await said("mine:latest") == 200
        chat = {"model": "mine", "messages": [{"role": "user", "content": "Hello"}]}
        assert (await client.post("/v1/chat/completions", json=chat)).status_code == 200
        assert [one["name"] for one in (await client.get("/api/tags")).json()["models"]] == [
            "demo:latest",
            "mine:latest",
        ]
        refused = [
            ("demo", "mine"),
            ("demo", "demo"),
            ("demo", ""),
            ("demo", "*"),
            ("demo", "a\nb"),
            ("demo", "a" * 201),
        ]
        assert [await copied(*names) for names in refused] == [400] * len(refused)
        assert await copied("other", "more") == 404
        assert (await delete(client, "mine")).status_code == 200 and await said("mine") == 404
        assert (await delete(client, "mine")).status_code == 404
        for index in range(63):
            assert await copied("demo", f"name{index}") == 200
        assert await copied("demo", "last") == 400

    with_client(FakeEngine(), work)


def test_a_copy_is_deleted_by_the_key_that_made_it() -> None:
    async def work(client: httpx2.AsyncClient) -> list[int]:
        body = {"source": "demo", "destination": "mine"}
        assert (await client.post("/api/copy", json=body)).status_code == 200
        client.headers["authorization"] = "Bearer l"
        refused = await delete(client, "mine")
        assert "another key" in refused.json()["error"]
        client.headers["authorization"] = "Bearer k"
        return [refused.status_code, (await delete(client, "mine")).status_code]

    assert with_client(FakeEngine(), work, headers=KEY, rules=Rules(keys=["k", "l"])) == [403, 200]


def test_files_are_for_clients_with_a_key() -> None:
    async def work(client: httpx2.AsyncClient) -> Any:
        return await delete(client, "demo")

    without = with_client(FakeEngine(), work)
    assert without.status_code == 403 and "--api-key" in without.json()["error"]
    loaded = with_client(FakeEngine(), work, headers=KEY, rules=Rules(keys=["k"]))
    assert loaded.status_code == 400 and "mlcpipe rm" in loaded.json()["error"]


def test_names_of_the_command_line_stay() -> None:
    """Also the one that stands for any."""

    async def work() -> list[int]:
        engine: Any = FakeEngine()
        app, guard = create_app(Rules(keys=["k"]))
        app.state.pool = pool = ModelPool.of(Service(engine, engine.tokenizer, Facts(("demo", "alias", "*"))))
        transport = httpx2.ASGITransport(app=guard)
        async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=KEY) as client:
            found = [await delete(client, name) for name in ("alias", "*", "other")]
            pool.models.clear()  # as after the last one was deleted
            listed = await client.get("/v1/models")
            assert listed.json()["data"] == [] and listed.json()["first_id"] is None
            found.append(await client.post("/v1/chat/completions", json={"messages": []}))
            found.append(await client.get("/lora-adapters"))
        return [one.status_code for one in found]

    assert asyncio.run(work()) == [400, 400, 404, 404, 404]


def test_a_model_is_deleted_once() -> None:
    removed: list[str] = []
    source: Any = SimpleNamespace(
        names=("a",), kind="text", check_removable=lambda: None, remove=lambda: removed.append("a"), stop=lambda: None
    )

    async def work() -> list[Any]:
        pool = ModelPool([source], lambda place: 0)
        (model,) = pool.models
        found = await asyncio.gather(*(_remove(pool, model) for _ in range(2)), return_exceptions=True)
        pool.close()
        return sorted(getattr(one, "status", 0) for one in found)

    assert asyncio.run(work()) == [0, 404] and removed == ["a"]


def test_what_is_the_server_s_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLCPIPE_CACHE", str(tmp_path / "cache"))
    folder, outside = tmp_path / "models", tmp_path / "outside"
    for path in (folder / "org" / "a", outside / "b"):
        path.mkdir(parents=True)
        (path / "mlcpipe.json").write_text("{}")
    (folder / "c.gguf").write_bytes(b"GGUF")
    (folder / "link").symlink_to(outside / "b")
    for spec in (str(outside / "b"), str(folder / "link"), str(folder), str(folder / ".." / "outside" / "b"), None):
        with pytest.raises(UsageError, match="not the server's own"):
            serve_removal.owned(spec, folder)
    with pytest.raises(UsageError, match="not the server's own"):
        serve_removal.owned(str(folder / "org" / "a"), None)
    for name in ("org/a", "c.gguf"):
        serve_removal.remove(serve_removal.owned(str(folder / name), folder))
    assert (
        sorted(path.name for path in folder.rglob("*")) == ["link", "org"] and (outside / "b" / "mlcpipe.json").exists()
    )
