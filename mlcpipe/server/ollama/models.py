"""Ollama's paths about models: its version, lists, facts, and what it does with files."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Mapping
from datetime import datetime, timezone
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse

from mlcpipe.server.bodies import body_schema, parsed
from mlcpipe.server.errors import OLLAMA_PATHS, ApiError
from mlcpipe.server.leases import any_service, pool_of
from mlcpipe.server.model_card import card_of
from mlcpipe.server.ollama.bodies import ModelBody
from mlcpipe.server.ollama.naming import names, served, tagged
from mlcpipe.server.ollama.replies import moment
from mlcpipe.server.pooled_model import Model, ModelCard
from mlcpipe.server.sse import EventStream, line

router = APIRouter()
VERSION = "0.12.6"  # of the API that is spoken here: clients refuse old ones
_FOREVER = datetime(9999, 1, 1, tzinfo=timezone.utc).timestamp()
_LOOK_S = 0.5  # between two looks at a load


class PullBody(ModelBody):
    """The body of `/api/pull`."""

    stream: bool | None = None


@router.get("/api/version")
async def version() -> dict[str, str]:
    """The version of Ollama whose API this is."""
    return {"version": VERSION}


@router.get("/api/tags")
async def tags(request: Request) -> dict[str, Any]:
    """The models that can be asked."""
    return {"models": [_listed(model, name) for model in pool_of(request).models for name in model.own_names]}


@router.get("/api/ps")
async def loaded(request: Request) -> dict[str, Any]:
    """The models in memory."""
    return {"models": [_in_memory(model) for model in pool_of(request).models if model.service is not None]}


def _in_memory(model: Model) -> dict[str, Any]:
    expires = _FOREVER if (left := model.ttl_s) is None or model.pinned else time.time() + left
    length = model.service.engine.context_length
    return {
        **_listed(model, model.name), "expires_at": moment(min(expires, _FOREVER)), "size_vram": 0,
        "context_length": length,
    }  # fmt: skip


@router.post("/api/show", openapi_extra=body_schema(ModelBody))
async def show(request: Request, body: Annotated[ModelBody, Depends(parsed(ModelBody))]) -> dict[str, Any]:
    """Facts of a model, which is not loaded for this: clients ask it of all that are listed."""
    pool = pool_of(request)
    name = served(pool, body.named)
    model = pool.find(name)
    card = await card_of(pool, model)
    kind = str(card.about.get("model_type", ""))
    info: dict[str, Any] = {"general.architecture": kind, "general.basename": name}
    info |= {f"{kind}.{key}": card.about[key] for key in ("context_length", "vocab_size") if key in card.about}
    if card.dimensions is not None:
        info[f"{kind}.embedding_length"] = card.dimensions
    return {
        "license": "",
        "modelfile": "",
        "parameters": _parameters(card),
        "template": card.template,
        "modified_at": moment(model.created),
        "details": _details(card.about),
        "model_info": info,
        "capabilities": list(card.capabilities),
    }


@router.post("/api/pull", openapi_extra=body_schema(PullBody), response_model=None)
async def pull(request: Request, body: Annotated[PullBody, Depends(parsed(PullBody))]) -> EventStream | JSONResponse:
    """Load one of the server's models, downloaded if necessary; others are not offered."""
    pool = pool_of(request)
    try:
        name = served(pool, body.named)
    except ApiError:
        message = f"pull: this server offers {', '.join(names(pool))} and downloads none; start it with another one"
        raise ApiError(404, message, code="model_not_found") from None
    if body.stream is False:
        await any_service(request, name)
        return JSONResponse({"status": "success"})
    loading = asyncio.ensure_future(any_service(request, name))

    async def lines() -> AsyncIterator[str]:
        """A line for each stage."""
        said = "pulling manifest"
        yield line({"status": said})
        while not (await asyncio.wait({loading}, timeout=_LOOK_S))[0]:
            if (words := pool.find(name).report.words) != said:
                said = words
                yield line({"status": said})
        loading.result()
        yield line({"status": "success"})

    def close() -> None:
        loading.cancel()

    return EventStream(lines(), close, lambda error: line(error.body(OLLAMA_PATHS)), lines=True)


def _listed(model: Model, name: str) -> dict[str, Any]:
    about = model.about
    digest = str(about.get("digest") or hashlib.sha256(name.encode()).hexdigest())
    return {
        "name": tagged(name),
        "model": tagged(name),
        "modified_at": moment(model.created),
        "size": about.get("bytes", 0),
        "digest": digest.rpartition(":")[2],
        "details": _details(about),
    }


def _details(about: Mapping[str, Any]) -> dict[str, Any]:
    family = str(about.get("model_type", ""))
    return {
        "parent_model": "",
        "format": "mlcpipe",
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": str(about.get("quantization", "")),
    }


def _parameters(card: ModelCard) -> str:
    """The model's own sampling settings, as lines of a Modelfile."""
    if (own := card.defaults) is None:
        return ""
    settings = {"temperature": own.temperature, "top_k": own.top_k, "top_p": own.top_p, "min_p": own.min_p,
                "repeat_penalty": own.repetition_penalty}  # fmt: skip
    return "\n".join(f"{name:<30} {value:g}" for name, value in settings.items())
