"""What clients ask about models without a request to them: it loads none, and is no use of a loaded one."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

pytest.importorskip("fastapi")

from mlcpipe.cli.serve_many import CommandModel
from mlcpipe.cli.serve_options import ServeOptions
from mlcpipe.server.app import create_app
from mlcpipe.server.memory_plan import MemoryPlan
from mlcpipe.server.model_pool import ModelPool
from mlcpipe.server.service import Facts, Service
from tests.conftest import DEMO
from tests.unit.server.fake_engine import FakeEngine

if TYPE_CHECKING:
    from tests.conftest import Bundles


async def asked(pool: ModelPool) -> list[Any]:
    """What is told about the model `demo`."""
    app, guard = create_app()
    app.state.pool = pool
    transport = httpx2.ASGITransport(app=guard)
    async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        answers = [
            await client.post("/api/show", json={"model": "demo"}), await client.get("/props"),
            await client.get("/slots"), await client.get("/v1/kv"), await client.delete("/v1/kv/a"),
        ]  # fmt: skip
    assert [one.status_code for one in answers] == [200] * len(answers), [one.text for one in answers]
    return [one.json() for one in answers]


def test_what_is_told_of_a_model_that_is_not_loaded(demo_bundles: Bundles, tmp_path: Path) -> None:
    (tmp_path / "a.prefix").write_bytes(b"abc")
    options = ServeOptions(model=[str(demo_bundles["q4f16_1"])], prefixes=tmp_path)
    tokenizer = FakeEngine().tokenizer

    async def test() -> None:
        pool = ModelPool([CommandModel(options, ("demo",), "text", MemoryPlan(1))], lambda place: 0)
        show, props, slots, saved, _ = await asked(pool)
        assert pool.state("demo") == "unloaded"
        pool.close()
        assert show["template"] == props["chat_template"] == tokenizer.chat_templates["default"]
        assert show["model_info"]["general.basename"] == "demo" and "completion" in show["capabilities"]
        assert props["default_generation_settings"]["n_ctx"] == 2048 and props["is_sleeping"] and not slots
        assert props["eos_token"] == tokenizer.special_tokens["eos_token"]
        assert [(one["id"], one["bytes"]) for one in saved["data"]] == [("a", 3)]

    asyncio.run(test())
    assert not list(tmp_path.iterdir())


def test_a_model_that_is_not_prepared_is_not_prepared_for_this() -> None:
    async def test() -> None:
        source = CommandModel(ServeOptions(model=[str(DEMO)]), ("demo",), "text", MemoryPlan(1))
        card = await asyncio.to_thread(source.card)
        assert card.capabilities == ("completion",) and not card.about and not card.template

    asyncio.run(test())


def test_looks_at_a_loaded_model_are_no_use_of_it(tmp_path: Path) -> None:
    from mlcpipe.server.prefix_store import PrefixStore

    (tmp_path / "a.prefix").write_bytes(b"abc")

    async def test() -> None:
        engine = FakeEngine()
        store: Any = PrefixStore(tmp_path, None, 0)  # type: ignore[arg-type]  # no file is read
        pool = ModelPool.of(Service(engine, engine.tokenizer, Facts(("demo",)), store))  # type: ignore[arg-type]
        used_s = pool.models[0].used_s
        _, props, slots, _, _ = await asked(pool)
        assert pool.models[0].used_s == used_s and len(slots) == props["total_slots"] == 1
        pool.close()

    asyncio.run(test())
