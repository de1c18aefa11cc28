"""The model of an HTTP request: leased when its handler asks, and released when its response is complete."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from fastapi import Request

from mlcpipe.server.model_pool import ModelPool
from mlcpipe.server.pooled_model import Kind
from mlcpipe.server.sse import unless_left

if TYPE_CHECKING:
    from mlcpipe.server.embedding_service import EmbeddingService
    from mlcpipe.server.service import Service
    from mlcpipe.server.speech_service import SpeechService


class Leasing:
    """An ASGI layer: inside, requests have a stack of leases, which ends with the response."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one request."""
        state = scope.setdefault("state", {})
        try:
            async with AsyncExitStack() as state["leases"]:
                await self._app(scope, receive, send)
        finally:  # the connection keeps its last scope, and would keep the memory of a model that was unloaded
            for name in ("leases", "service"):
                state.pop(name, None)


def pool_of(request: Request) -> ModelPool:
    """The server's models."""
    pool: ModelPool = request.app.state.pool
    return pool


async def text_service(request: Request, model: str | None) -> Service:
    """The service of a model that writes text, until the response is complete. Raises ApiError."""
    service: Service = await _leased(request, model, "text")
    return service


async def any_service(request: Request, model: str | None) -> Service | EmbeddingService:
    """The service of any model of text, until the response is complete. Raises ApiError."""
    service: Service | EmbeddingService = await _leased(request, model, None)
    return service


async def embedding_service(request: Request, model: str | None) -> EmbeddingService:
    """The service of a model that embeds texts, until the response is complete. Raises ApiError."""
    service: EmbeddingService = await _leased(request, model, "embed")
    return service


async def rerank_service(request: Request, model: str | None) -> EmbeddingService:
    """The service of a model that scores documents, until the response is complete. Raises ApiError."""
    service: EmbeddingService = await _leased(request, model, "rerank")
    return service


async def speech_service(request: Request, model: str | None) -> SpeechService:
    """The service of a model that hears, until the response is complete. Raises ApiError."""
    service: SpeechService = await _leased(request, model, "speech")
    return service


async def _leased(request: Request, model: str | None, kind: Kind | None) -> Any:
    """A client that leaves while its model loads waits no more."""
    leases: AsyncExitStack = request.state.leases
    pool = pool_of(request)
    leased = leases.enter_async_context(pool.lease(model, kind))
    if pool.single:
        service = await leased
    else:
        service = await unless_left(request, leased, lambda: None)
    request.state.service = service
    return service
