"""`/v1/models`: the served models, with facts of the bundle."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from mlcpipe.server.service import Service

router = APIRouter()


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """All names of the model, and of its adapters."""
    service: Service = request.app.state.service
    names = [name for name in (*service.facts.names, *service.adapters) if name != "*"]
    listed = [_model(service, name) for name in names]
    return {"object": "list", "data": listed, "has_more": False, "first_id": names[0], "last_id": names[-1]}


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> dict[str, Any]:
    """One model. Raises ApiError for an unknown one."""
    service: Service = request.app.state.service
    service.check_model(name)
    return _model(service, name)


def _model(service: Service, name: str) -> dict[str, Any]:
    """In OpenAI's form, with Anthropic's extra fields, and vLLM's `parent` of an adapter."""
    adapter = service.adapters.get(name)
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "display_name": name,
        "created": service.created,
        "owned_by": "mlcpipe",
        "root": service.name if adapter is None else str(adapter.path),
        "parent": None if adapter is None else service.name,
        "max_model_len": service.engine.context_length,
        "meta": {
            "context_length": service.engine.context_length,
            "vocab_size": service.engine.vocab_size,
            **service.meta,
        },
    }
