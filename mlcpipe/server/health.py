"""`/health` for monitors, `/metrics` for Prometheus, `/status` for the page at `/`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from mlcpipe.server.metrics import CONTENT_TYPE

router = APIRouter()
LOADING = {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}


@router.get("/health", response_model=None)
@router.get("/v1/health", response_model=None)
async def health(request: Request) -> JSONResponse:
    """200 once the model is loaded, as long as its engine lives."""
    service = request.app.state.service
    if service is None:
        return JSONResponse(LOADING, 503, {"retry-after": "1"})
    if service.engine.fault:
        return JSONResponse({"error": {"code": 503, "message": service.engine.fault, "type": "unavailable_error"}}, 503)
    return JSONResponse({"status": "ok"})


@router.get("/metrics", response_model=None)
async def metrics(request: Request) -> Response:
    """Counters, gauges and histograms."""
    text = await request.app.state.service.apart(request.app.state.service.metrics.text)
    return Response(text, media_type=CONTENT_TYPE)


@router.get("/status")
async def status(request: Request) -> dict[str, Any]:
    """The figures of the page at `/`."""
    service = request.app.state.service
    stats = service.engine.stats()
    return {
        "model": service.name,
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
