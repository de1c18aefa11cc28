"""From a bundle to a running server: listen at once, load in a thread, drain on shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import uvicorn
from fastapi.middleware.cors import CORSMiddleware

from mlcpipe.errors import UsageError
from mlcpipe.runtime.serving.adapters import Adapter
from mlcpipe.runtime.serving.interface import ServingEngine
from mlcpipe.runtime.text.tokenizer import Tokenizer
from mlcpipe.server.access import Access
from mlcpipe.server.app import create_app
from mlcpipe.server.connections import ACCEPTED_AT_ONCE, Connection, most_connections
from mlcpipe.server.embedding_service import EmbeddingEngine, EmbeddingService
from mlcpipe.server.guard import Guard, Rules
from mlcpipe.server.model_pool import ModelPool
from mlcpipe.server.prefix_store import PrefixStore
from mlcpipe.server.semantic_cache import CachingService, SemanticCache
from mlcpipe.server.service import Facts, Service
from mlcpipe.server.speech_service import SpeechEngine, SpeechService

_KEEP_ALIVE_S = 75
_WAITING = 2048  # backlog of connections
_LAST_S = 5  # after draining, for the last events to go out


@dataclass(frozen=True)
class Loaded:
    """The loaded model of a server."""

    engine: ServingEngine
    tokenizer: Tokenizer
    facts: Facts
    prefixes: PrefixStore | None = None
    adapters: Mapping[str, Adapter] = field(default_factory=dict)
    semantic_cache: SemanticCache | None = None

    def service(self) -> Service:
        """The service, made inside the event loop."""
        parts = self.engine, self.tokenizer, self.facts, self.prefixes, self.adapters
        return Service(*parts) if self.semantic_cache is None else CachingService(self.semantic_cache, *parts)

    def pool(self) -> ModelPool:
        """The service alone."""
        return ModelPool.of(self.service())


@dataclass(frozen=True)
class LoadedEmbedder:
    """The loaded model of an embedding server."""

    engine: EmbeddingEngine
    facts: Facts
    max_queue: int

    def service(self) -> EmbeddingService:
        """The service."""
        return EmbeddingService(self.engine, self.facts, self.max_queue)

    def pool(self) -> ModelPool:
        """The service alone."""
        return ModelPool.of(self.service())


@dataclass(frozen=True)
class LoadedTranscriber:
    """The loaded model of a server of speech."""

    engine: SpeechEngine
    facts: Facts
    max_queue: int

    def service(self) -> SpeechService:
        """The service."""
        return SpeechService(self.engine, self.facts, self.max_queue)

    def pool(self) -> ModelPool:
        """The service alone."""
        return ModelPool.of(self.service())


class Servable(Protocol):
    """The input of a server."""

    def pool(self) -> Any:
        """The models, made inside the event loop: at the end it gets `end(drain_s)` there, and `close()` last."""


AnyLoaded = TypeVar("AnyLoaded", bound=Servable)


def serve(
    bound: Sequence[socket.socket],
    load: Callable[[], AnyLoaded],
    rules: Rules,
    ready: Callable[[AnyLoaded], None],
    drain_s: float,
    create: Callable[[Rules], tuple[Any, Guard]] = create_app,
) -> None:
    """Serve on sockets until SIGTERM or Ctrl-C, then let requests finish for `drain_s` seconds.

    `load` runs in a thread while the server reports that it loads; then `ready` is called. Raises what they raise.
    `create` makes the application, whose `state.pool` will have what was loaded, and the guard around it.
    """
    app, guard = create(rules)
    certificate, key = rules.tls or (None, None)
    config = uvicorn.Config(
        Access(_with_cors(guard, rules), _write_line if rules.logs_access else None),
        ssl_certfile=certificate,
        ssl_keyfile=key,
        http=partial(Connection, most=most_connections(), refused=guard.refused),  # type: ignore[arg-type]
        backlog=ACCEPTED_AT_ONCE,
        lifespan="off",
        log_level="critical",
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=round(drain_s) + _LAST_S,
        ws="none",
    )

    class Draining(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            """More connections than are accepted at once may wait in the system."""
            await super().startup(sockets)
            for one in bound:
                one.listen(_WAITING)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            """The engine ends requests that run too long, so that clients are told before they are cut off."""
            if app.state.pool is not None:
                app.state.pool.end(drain_s)
            await super().shutdown(sockets)

    server = Draining(config)
    failure: list[BaseException] = []

    async def run() -> None:
        loop = asyncio.get_running_loop()

        def install(loaded: AnyLoaded) -> None:
            try:
                app.state.pool = loaded.pool()
                ready(loaded)
            except BaseException as error:
                fail(error)

        def fail(error: BaseException) -> None:
            failure.append(error)
            server.should_exit = True

        def loading() -> None:
            try:
                loaded = load()
            except BaseException as error:
                call, argument = fail, error
            else:
                call, argument = install, loaded  # type: ignore[assignment]
            with contextlib.suppress(RuntimeError):  # the server ended meanwhile
                loop.call_soon_threadsafe(call, argument)

        threading.Thread(target=loading, name="mlcpipe-loading", daemon=True).start()  # __main__ knows the name
        try:
            await server.serve(sockets=[*bound])
        finally:
            if app.state.pool is not None:
                app.state.pool.close()

    logging.getLogger("mlcpipe.server").setLevel(logging.ERROR)
    with _terminated_quietly():
        asyncio.run(run())
    if failure:
        raise failure[0]


def _with_cors(guard: Guard, rules: Rules) -> Any:
    """Let pages of allowed origins ask first, which browsers do without a key, and read answers, refusals too."""
    if not rules.origins:
        return guard
    return CORSMiddleware(
        cast(Any, guard), allow_origin_regex=rules.origin_pattern, allow_methods=["*"], allow_headers=["*"],
        expose_headers=["retry-after", "x-cache", "x-request-id", "request-id"],
    )  # fmt: skip


def _write_line(line: str) -> None:
    """To the standard output; a reader that has gone ends no request."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


def check_tls(tls: tuple[Path, Path]) -> None:
    """Raises UsageError for files that are no certificate with its key."""
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(*tls, password=lambda: "")
    except OSError as error:  # SSLError is one
        raise UsageError(
            "--tls-cert and --tls-key", where=tls[0], expected="a certificate in PEM and its key, without a password",
            found=error.strerror or error,
        ) from None  # fmt: skip


@contextlib.contextmanager
def _terminated_quietly() -> Iterator[None]:
    """uvicorn raises the signal that ended it again: SIGTERM must not end the process before it has cleaned up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
