"""`/v1/models`: the served models, with facts of their bundles."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request

from mlcpipe.server import codex
from mlcpipe.server.bodies import Body, body_schema, parsed
from mlcpipe.server.leases import pool_of
from mlcpipe.server.pooled_model import Model

router = APIRouter()
# Of llama-server's router, which has no other words.
_STATUS = {"ready": "loaded", "unloading": "loaded", "failed": "unloaded"}


class NameBody(Body):
    """The name of a model."""

    model: str


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """All names of the models, and of their adapters."""
    listed = [_described(model, name) for model in pool_of(request).models for name in model.own_names]
    ids = [one["id"] for one in listed]
    first, last = (ids[0], ids[-1]) if ids else (None, None)  # all may be deleted
    found = {"object": "list", "data": listed, "has_more": False, "first_id": first, "last_id": last}
    if "client_version" in request.query_params:  # Codex
        found["models"] = [codex.described(one["id"], one["max_model_len"]) for one in listed]
    return found


@router.post("/v1/models/load", openapi_extra=body_schema(NameBody))
async def load(request: Request, body: Annotated[NameBody, Depends(parsed(NameBody))]) -> dict[str, bool]:
    """Begin to load a model, as llama-server's router does; `status` in the list says when it is. Raises ApiError."""
    pool_of(request).preload(body.model)
    return {"success": True}


@router.post("/v1/models/unload", openapi_extra=body_schema(NameBody))
async def unload(request: Request, body: Annotated[NameBody, Depends(parsed(NameBody))]) -> dict[str, bool]:
    """Unload a model once its requests are answered. Raises ApiError for one that stays."""
    await pool_of(request).unload(body.model)
    return {"success": True}


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> dict[str, Any]:
    """One model. Raises ApiError for an unknown one."""
    return _described(pool_of(request).find(name), name)


def _described(model: Model, name: str) -> dict[str, Any]:
    """In OpenAI's form, with Anthropic's extra fields, vLLM's `parent` of an adapter, and the state."""
    folder = model.adapter_folder(name)
    service = model.service
    described: dict[str, Any] = {
        "id": name,
        "object": "model",
        "type": "model",
        "display_name": name,
        "created": model.created,
        "owned_by": "mlcpipe",
        "root": model.name if folder is None else str(folder),
        "parent": None if folder is None else model.name,
        "state": model.state,
        "status": {"value": _STATUS.get(model.state, model.state), **({"failed": True} if model.failure else {})},
    }
    if model.state == "loading":
        described["progress"] = model.report.described
    if model.failure is not None:
        described["error"] = model.failure.message
    if service is None:
        about = model.source.about
        return {**described, "max_model_len": about.get("context_length"), "meta": about}
    context, vocab = service.engine.context_length, service.engine.vocab_size
    meta = {"context_length": context, "vocab_size": vocab, **service.meta}
    return {**described, "max_model_len": context, "meta": meta}
