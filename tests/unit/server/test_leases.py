"""A request and its model: what the connection keeps of it, and what becomes of a load when its client leaves."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

pytest.importorskip("fastapi")

from mlcpipe.errors import ResourceError, UsageError
from mlcpipe.server.app import create_app
from mlcpipe.server.leases import Leasing
from mlcpipe.server.load_report import LoadReport
from mlcpipe.server.model_pool import ModelPool
from mlcpipe.server.pooled_model import Kind, Room

TEXT, CHAT = {"prompt": "a"}, {"messages": [{"role": "user", "content": "a"}]}
EMBED = {"input": "a", "model": "words"}
LOADING: list[tuple[str, dict[str, Any] | None]] = [
    ("/v1/completions", TEXT), ("/v1/completions", {**TEXT, "stream": True}),
    ("/v1/chat/completions", CHAT), ("/v1/chat/completions", {**CHAT, "stream": True}),
    ("/v1/messages", {**CHAT, "model": "demo", "max_tokens": 1}),
    ("/v1/messages", {**CHAT, "model": "demo", "max_tokens": 1, "stream": True}),
    ("/v1/messages/count_tokens", {**CHAT, "model": "demo"}),
    ("/v1/responses", {"input": "a"}), ("/v1/responses", {"input": "a", "stream": True}),
    ("/v1/responses/input_tokens", {"input": "a"}), ("/v1/responses", {"input": "a", "background": True}),
    ("/v1/responses/compact", {"input": "a"}), ("/v1/chat/completions/input_tokens", CHAT),
    ("/embedding", {"content": "a", "model": "words"}), ("/lora-adapters", []),
    ("/completion", TEXT), ("/completion", {**TEXT, "stream": True}), ("/apply-template", CHAT),
    ("/infill", {"input_prefix": "a", "input_suffix": "b"}),
    ("/tokenize", {"content": "a"}), ("/detokenize", {"tokens": [1]}),
    ("/api/chat", {**CHAT, "model": "demo"}), ("/api/chat", {**CHAT, "model": "demo", "stream": False}),
    ("/api/generate", {**TEXT, "model": "demo"}), ("/api/generate", {**TEXT, "model": "demo", "stream": False}),
    ("/api/pull", {"model": "demo"}), ("/api/pull", {"model": "demo", "stream": False}),
    ("/api/embed", EMBED), ("/api/embeddings", {"prompt": "a", "model": "words"}),
    ("/v1/embeddings", EMBED), ("/v1/pooling", EMBED), ("/v1/score", {"text_1": "a", "text_2": "b", "model": "words"}),
    ("/v1/rerank", {"query": "a", "documents": ["b"], "model": "ranks"}),
    ("/v2/rerank", {"query": "a", "documents": ["b"], "model": "ranks"}),
    ("/v1/kv/save", {**TEXT, "name": "a"}), ("/v1/kv/restore", {"name": "a"}),
]  # fmt: skip


class Source:
    """A model whose preparation only ends when it is stopped."""

    def __init__(self, name: str, kind: Kind) -> None:
        self.names, self.guess, self.about = (name,), kind, dict[str, Any]()
        self.kind: Kind | None = kind
        self._stopped = threading.Event()

    def prepare(self, report: LoadReport) -> None:
        assert self._stopped.wait(60)
        raise ResourceError("stopped")

    def room(self) -> Room:
        raise AssertionError("was stopped")

    def load(self, report: LoadReport) -> Any:
        raise AssertionError("was stopped")

    def free(self) -> None:
        raise AssertionError("was not loaded")

    def stop(self) -> None:
        self._stopped.set()

    def check_removable(self) -> None:
        raise UsageError("kept")

    def remove(self) -> None:
        raise UsageError("kept")


async def left(app: Any, pool: ModelPool, path: str, body: Any) -> None:
    """Post, wait until a model loads for it, leave, and wait for the end."""
    gone = asyncio.Event()
    parts = [{"type": "http.request", "body": json.dumps(body).encode()}]

    async def receive() -> dict[str, Any]:
        if parts:
            return parts.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        pass

    scope = {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
        "headers": [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")], "http_version": "1.1",
        "scheme": "http", "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2), "root_path": "",
    }  # fmt: skip
    asked = asyncio.create_task(app(scope, receive, send))
    while not any(one.waiting for one in pool.models):
        assert not asked.done(), "it did not ask for a model"
        await asyncio.sleep(0)
    gone.set()
    await asked


@pytest.mark.parametrize(("path", "body"), LOADING, ids=str)
def test_a_client_that_leaves_while_its_model_loads_waits_no_more(path: str, body: Any) -> None:
    async def test() -> None:
        app, guard = create_app(serves="all")
        kinds: tuple[tuple[str, Kind], ...] = (("demo", "text"), ("words", "embed"), ("ranks", "rerank"))
        app.state.pool = pool = ModelPool([Source(*one) for one in kinds], lambda place: 1)
        await left(guard, pool, path, body)
        assert not any(one.waiting for one in pool.models)
        while any(one.state != "unloaded" for one in pool.models):
            await asyncio.sleep(0)
        pool.close()

    asyncio.run(asyncio.wait_for(test(), 60))


def test_a_connection_keeps_nothing_of_a_request_that_has_ended() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["state"]["service"] = object()
        raise ValueError

    scope: dict[str, Any] = {"state": {"owner": ""}}
    with pytest.raises(ValueError):
        asyncio.run(Leasing(app)(scope, None, None))
    assert scope["state"] == {"owner": ""}
