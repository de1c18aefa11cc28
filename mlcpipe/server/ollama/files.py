"""Ollama's `/api/copy` and `/api/delete`: other names of models, and the removal of files that the server owns."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Depends, Request

from mlcpipe.server.bodies import Body, body_schema, key_of, parsed
from mlcpipe.server.errors import ApiError
from mlcpipe.server.leases import pool_of
from mlcpipe.server.model_pool import ModelPool
from mlcpipe.server.ollama.bodies import LATEST, ModelBody
from mlcpipe.server.ollama.naming import served
from mlcpipe.server.pooled_model import Model

router = APIRouter()
MAX_NAMES = 64  # of one model
_MAX_CHARS = 200


class CopyBody(Body):
    """The body of `/api/copy`."""

    source: str
    destination: str


@router.post("/api/copy", openapi_extra=body_schema(CopyBody))
async def copy(request: Request, body: Annotated[CopyBody, Depends(parsed(CopyBody))]) -> None:
    """Give a model another name, until the server ends. Raises ApiError."""
    pool, name = pool_of(request), body.destination.removesuffix(LATEST)
    model = pool.find(source := served(pool, body.source))
    if source in model.adapter_names:
        raise ApiError(400, f"source: {source!r} is an adapter, which has one name", param="source")
    if not 0 < len(name) <= _MAX_CHARS or not name.isprintable() or name == "*":
        raise ApiError(400, f"destination: expected 1 to {_MAX_CHARS} printable characters", param="destination")
    if any(one.answers_to(name) for one in pool.models):
        raise ApiError(400, f"destination: there is a model {name!r} already", param="destination")
    if len(model.source.names) >= MAX_NAMES:
        raise ApiError(400, f"destination: the model has {MAX_NAMES} names already; delete one", param="destination")
    model.copied[name] = key_of(request)
    _rename(model, (*model.source.names, name))


@router.delete("/api/delete", openapi_extra=body_schema(ModelBody))
async def delete(request: Request, body: Annotated[ModelBody, Depends(parsed(ModelBody))]) -> None:
    """Take away a name that `copy` gave; with a model's first name its files, where they are the server's own.

    Raises ApiError.
    """
    pool = pool_of(request)
    model = pool.find(name := served(pool, body.named))
    if name in model.adapter_names:
        raise ApiError(400, f"delete: {name!r} is an adapter; /v1/unload_lora_adapter unloads it")
    if name in model.copied:
        if model.copied[name] != key_of(request):
            raise ApiError(403, f"delete: the name {name!r} was given by a client with another key, and stays")
        del model.copied[name]
        return _rename(model, tuple(one for one in model.source.names if one != name))
    if name in model.source.names[1:]:
        message = f"delete: {name!r} is a name of the command line, and stays; {model.name!r} stands for the model"
        raise ApiError(400, message)
    if name != model.name:
        raise ApiError(404, f"the model {name[:100]!r} is not served here", code="model_not_found", param="model")
    if not request.app.state.rules.keys:
        raise ApiError(403, "delete: files are removed for clients with a key alone: start the server with --api-key")
    await _remove(pool, model)


def _rename(model: Model, names: tuple[str, ...]) -> None:
    model.source.names = names
    if model.service is not None:
        model.service.facts = replace(model.service.facts, names=names)


async def _remove(pool: ModelPool, model: Model) -> None:
    """Unload a model, serve it no more, and remove its files. Raises ApiError, and then it is served as before."""
    await pool.apart(model.source.check_removable)
    if model.service is not None or model.state not in ("unloaded", "failed"):
        await pool.unload(model.name)
    if model not in pool.models:
        raise ApiError(404, f"the model {model.name!r} was deleted meanwhile", code="model_not_found", param="model")
    if model.state not in ("unloaded", "failed"):
        raise ApiError(409, f"the model {model.name!r} is in use again; try again later", code="overloaded")
    place = pool.models.index(model)
    pool.models.remove(model)  # from here on no request loads it
    try:
        await pool.apart(model.source.remove)
    except BaseException:
        pool.models.insert(place, model)
        raise
