"""The ASGI application: every API behind one guard."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from mlcpipe.errors import MlcpipeError
from mlcpipe.server import (
    adapters,
    chat,
    completions,
    embeddings,
    health,
    llama_cpp,
    messages,
    models,
    ollama,
    prefixes,
    responses,
    scoring,
    stored_conversations,
    stored_responses,
    tokenize,
    transcriptions,
)
from mlcpipe.server.background import Runs
from mlcpipe.server.conversation_store import ConversationStore
from mlcpipe.server.errors import ApiError, refused
from mlcpipe.server.guard import OPEN_PATHS, Guard, Rules
from mlcpipe.server.leases import Leasing
from mlcpipe.server.metrics import Metrics
from mlcpipe.server.model_pool import ModelPool
from mlcpipe.server.page import PAGE, page_router
from mlcpipe.server.response_store import ResponseStore
from mlcpipe.version import __version__

_OWN = (
    chat, completions, responses, stored_responses, stored_conversations, messages, models, tokenize, prefixes,
    adapters, health,
)  # fmt: skip
APIS = (*(api.router for api in _OWN), *ollama.ROUTERS, *llama_cpp.ROUTERS)
EMBEDDING_APIS = (
    embeddings.router, scoring.router, models.router, health.router, *ollama.EMBEDDING_ROUTERS,
    *llama_cpp.EMBEDDING_ROUTERS,
)  # fmt: skip
SPEECH_APIS = (transcriptions.router, models.router, health.router)
ALL_APIS = tuple({id(router): router for router in (*APIS, *EMBEDDING_APIS, *SPEECH_APIS)}.values())
Serves = Literal["text", "embeddings", "speech", "all"]


def create_app(
    rules: Rules = Rules(), page: Path = PAGE, *, serves: Serves = "text", store: ResponseStore | None = None
) -> tuple[FastAPI, Guard]:
    """The application, and the guard around it, which the server runs; `page` is the folder of the chat page.
    A server of embeddings or of speech alone has other paths, and no page. Without a `store` responses stay in memory.

    `app.state.pool` has the models. It is None until a server's single model is loaded; until then requests get 503.
    """
    app = FastAPI(title="mlcpipe", version=__version__, docs_url=None, redoc_url=None)
    app.state.responses = ResponseStore() if store is None else store
    app.state.runs, app.state.conversations = Runs(), ConversationStore()
    app.state.pool, app.state.rules, app.state.serves = None, rules, serves
    for router in {"text": APIS, "embeddings": EMBEDDING_APIS, "speech": SPEECH_APIS, "all": ALL_APIS}[serves]:
        app.include_router(router)
    open_paths = {*OPEN_PATHS}
    if serves in ("text", "all"):
        files = page_router(page)
        app.include_router(files)
        open_paths |= {route.path for route in files.routes}  # type: ignore[attr-defined]
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(MlcpipeError, _mlcpipe_error)
    app.add_exception_handler(RequestValidationError, _wrong_query)
    app.add_exception_handler(404, _no_path)
    app.add_exception_handler(405, _no_method)
    app.add_exception_handler(Exception, _bug)

    def count(error: ApiError) -> None:
        if app.state.pool is not None:
            app.state.pool.metrics.count_rejected(error)

    return app, Guard(_loaded(app, {*open_paths, "/openapi.json"}), rules, count, open_paths)


def _loaded(app: FastAPI, open_paths: Collection[str]) -> Any:
    leasing = Leasing(app)

    async def serve(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and app.state.pool is None and scope["path"] not in open_paths:
            raise ApiError(503, "Loading model", retry_after_s=1.0)
        await leasing(scope, receive, send)

    return serve


async def _api_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    pool: ModelPool | None = request.app.state.pool
    if pool is not None:
        metrics: Metrics = getattr(request.state, "service", pool).metrics
        metrics.count_rejected(error)
    return JSONResponse(error.body(request.url.path), error.status, error.headers)


async def _mlcpipe_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, MlcpipeError)
    return await _api_error(request, refused(error))


async def _wrong_query(request: Request, error: Exception) -> JSONResponse:
    """Fields of the query or the path: bodies are checked by `bodies.parsed`."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name = str(first["loc"][-1])
    return await _api_error(request, ApiError(400, f"{name}: {first['msg']}", param=name, code="invalid_query"))


async def _bug(request: Request, error: Exception) -> JSONResponse:
    """The guard logs it."""
    return await _api_error(request, ApiError(500, "the server failed; its log says why"))


def _paths(*routers: APIRouter) -> set[str]:
    return {route.path for router in routers for route in router.routes}  # type: ignore[attr-defined]


async def _no_path(request: Request, error: Exception) -> JSONResponse:
    path = request.url.path
    message = f"there is no {request.method} {path[:200]}"
    serves = request.app.state.serves
    if serves == "embeddings" and path in _paths(*APIS):
        message += ": this model embeds texts and writes none"
    elif serves == "speech" and path in _paths(*ALL_APIS):
        message += ": this model turns sound into text; ask /v1/audio/transcriptions"
    elif serves == "text" and path in _paths(*EMBEDDING_APIS):
        message += ": this model writes text; for embeddings run `mlcpipe serve` with an encoder"
    elif path in _paths(*SPEECH_APIS):
        message += ": this model hears nothing; for speech run `mlcpipe serve` with one such as Whisper"
    return await _api_error(request, ApiError(404, message, code="not_found"))


async def _no_method(request: Request, error: Exception) -> JSONResponse:
    return await _api_error(request, ApiError(405, f"the path does not take {request.method}", code="not_allowed"))
