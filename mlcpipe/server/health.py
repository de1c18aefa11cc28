"""`/health` (and `/ping`) for monitors, `/metrics` for Prometheus, `/status` for the page at `/`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from mlcpipe.server.leases import pool_of
from mlcpipe.server.metrics import CONTENT_TYPE, merged
from mlcpipe.server.model_card import card_of
from mlcpipe.server.model_pool import ModelPool
from mlcpipe.server.pooled_model import Model
from mlcpipe.version import __version__

router = APIRouter()
LOADING = {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}


@router.get("/health", response_model=None)
@router.get("/v1/health", response_model=None)
@router.get("/ping", response_model=None)
@router.post("/ping", response_model=None, include_in_schema=False)
async def health(request: Request) -> JSONResponse:
    """200 once a single model is loaded, as long as its engine lives. With several, 200 and what each of them does."""
    pool: ModelPool | None = request.app.state.pool
    if pool is None:
        return JSONResponse(LOADING, 503, {"retry-after": "1"})
    if not pool.single:
        told = [_told(model) for model in pool.models]
        if request.app.state.rules.keys:  # the path needs no key: it names nothing
            told = [{key: value for key, value in one.items() if key not in ("model", "error")} for one in told]
        return JSONResponse({"status": "ok", "models": told})
    fault = pool.models[0].service.engine.fault
    if fault:
        return JSONResponse({"error": {"code": 503, "message": fault, "type": "unavailable_error"}}, 503)
    return JSONResponse({"status": "ok"})


def _told(model: Model) -> dict[str, Any]:
    told: dict[str, Any] = {"model": model.name, "state": model.state}
    if model.state == "loading":
        told["progress"] = model.report.described
    if model.failure is not None:
        told["error"] = model.failure.message
    return told


@router.get("/version")
async def version() -> dict[str, str]:
    """The version of mlcpipe."""
    return {"version": __version__}


@router.get("/metrics", response_model=None)
async def metrics(request: Request) -> Response:
    """Counters, gauges and histograms; of several models, each with its name as `model`."""
    pool = pool_of(request)
    if pool.single:
        return Response(await pool.apart(pool.metrics.text), media_type=CONTENT_TYPE)
    sources = {model.name: model.metrics for model in pool.models}

    def text() -> bytes:
        return merged({"": pool.metrics.text(), **{name: one() for name, one in sources.items()}}, "model")

    return Response(await pool.apart(text), media_type=CONTENT_TYPE)


@router.get("/status")
async def status(request: Request, model: str | None = None) -> dict[str, Any]:
    """The figures of the page at `/`; of several models, those of one that writes text, by default the first.

    Raises ApiError for an unknown model, or one of another kind.
    """
    pool = pool_of(request)
    found = pool.find(model, "text")
    service = found.service
    if service is None:
        sees = "vision" in (await card_of(pool, found)).capabilities
        about = found.source.about
        zeros = ("running", "waiting", "kv_usage", "prompt_tokens", "cached_tokens", "generated_tokens")
        return {
            "model": found.name, "sees": sees, **dict.fromkeys(zeros, 0), "finished": {},
            "context_length": about.get("context_length") or 0, "about": about, "models": _all_told(pool),
        }  # fmt: skip
    stats = service.engine.stats()
    told = {
        "model": service.name,
        "sees": service.facts.vision is not None,
        "running": stats.running,
        "waiting": stats.waiting,
        "kv_usage": stats.kv_usage,
        "prompt_tokens": stats.prompt,
        "cached_tokens": stats.cached,
        "generated_tokens": stats.generated,
        "finished": stats.finished,
        "context_length": service.engine.context_length,
        "about": dict(service.facts.about),
    }
    return told if pool.single else {**told, "models": _all_told(pool)}


def _all_told(pool: ModelPool) -> list[dict[str, Any]]:
    """Those that may write text."""
    return [_told(model) for model in pool.models if (model.kind or model.source.guess) == "text"]
