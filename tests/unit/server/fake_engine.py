"""A server whose engine answers from a script, for what is no matter of the model."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import httpx2

from mlcpipe.errors import ComputeError
from mlcpipe.runtime.serving.interface import EngineStats, OverloadedError, Request, Stream, TokenEvent, Wake
from mlcpipe.runtime.text.tokenizer import Tokenizer
from mlcpipe.server.app import create_app
from mlcpipe.server.guard import Rules
from mlcpipe.server.model_pool import ModelPool
from mlcpipe.server.response_store import ResponseStore
from mlcpipe.server.service import Facts, Service
from tests.conftest import DEMO

_T = TypeVar("_T")


class FakeEngine:
    """Answers every request with `text`, and `ends` or not, or `fails` then, or raises `error`; keeps what it was asked.
    One that is `full` has no place in its queue.
    """

    context_length = kv_tokens = 2048
    fault = ""

    def __init__(
        self,
        text: str = "Hello",
        error: Exception | None = None,
        *,
        ends: bool = True,
        dropped: int | None = None,
        full: bool = False,
        fails: bool = False,
    ) -> None:
        config = json.loads((DEMO / "config.json").read_text())
        self.tokenizer = Tokenizer.load(Path(DEMO), generation_config={}, config=config)
        self.vocab_size = self.tokenizer.vocab_size
        self.together = contextlib.nullcontext()
        self.asked: list[Request] = []
        self.cancelled: list[str] = []
        self._text, self._error, self._ends, self._full, self._fails = text, error, ends, full, fails
        self.context_shift, self._dropped = dropped is not None, dropped or 0

    def check_queue(self) -> None:
        if self._full:
            raise OverloadedError("the queue is full", 1.0)

    def submit(self, request: Request, wake: Wake | None = None) -> Stream:
        if self._error is not None:
            raise self._error
        self.asked.append(request)
        stream = Stream(len(self.asked), request, wake)
        for token in self.tokenizer.encode(self._text):
            stream.put(TokenEvent(token))
        if self._fails:
            stream.put(TokenEvent(None, "error", error=ComputeError("the model computed NaN")))
        elif self._ends:
            stream.put(TokenEvent(min(self.tokenizer.eos_token_ids), "stop", dropped=self._dropped))
        if wake is not None:
            wake([stream])
        return stream

    def cancel(self, number: int, reason: str = "cancelled") -> None:
        self.cancelled.append(reason)

    def stats(self) -> EngineStats:
        return EngineStats()

    def close(self, drain_s: float = 0.0) -> None:
        pass


def answers(
    engine: FakeEngine,
    *requests: tuple[str, Any],
    headers: dict[str, str] | list[tuple[str, str]] | None = None,
    rules: Rules = Rules(),
    store: ResponseStore | None = None,
) -> Sequence[Any]:
    """The responses to bodies (bytes, or what becomes JSON) that are posted, one after the other; None gets."""

    async def ask(client: httpx2.AsyncClient) -> list[Any]:
        return [
            await client.request(
                "GET" if body is None else "POST",
                path,
                content=body if isinstance(body, bytes | None) else json.dumps(body),
            )
            for path, body in requests
        ]

    return with_client(engine, ask, headers=headers, rules=rules, store=store)


def with_client(
    engine: FakeEngine,
    work: Callable[[httpx2.AsyncClient], Awaitable[_T]],
    *,
    headers: dict[str, str] | list[tuple[str, str]] | None = None,
    rules: Rules = Rules(),
    store: ResponseStore | None = None,
) -> _T:
    """The result of `work` with a client of a server."""

    async def run() -> _T:
        app, guard = create_app(rules)
        app.state.responses = store or app.state.responses
        app.state.pool = pool = ModelPool.of(Service(engine, engine.tokenizer, Facts(("demo",))))
        async with httpx2.AsyncClient(
            transport=httpx2.ASGITransport(app=guard), base_url="http://127.0.0.1", headers=headers
        ) as client:
            made = await work(client)
        pool.close()
        return made

    return asyncio.run(run())
