"""`/v1/kv`: saves computed prompts to files, and restores them without computing, also in another server."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request

from mlcpipe.errors import MlcpipeError
from mlcpipe.runtime.answer_reader import Reading
from mlcpipe.runtime.sampling_params import SamplingParams
from mlcpipe.runtime.serving import interface
from mlcpipe.server.answers import Answers
from mlcpipe.server.bodies import Body, body_schema, owner_of, parsed
from mlcpipe.server.errors import ApiError, refused
from mlcpipe.server.leases import pool_of, text_service
from mlcpipe.server.prefix_store import PrefixFolder, PrefixStore
from mlcpipe.server.service import Service
from mlcpipe.server.sse import unless_left
from mlcpipe.server.tokenize import PromptFields, tokens_of
from tir_schedules.step_layout import PAGE

router = APIRouter()


class SaveBody(PromptFields):
    """A text or a conversation, and the name to save its prompt under."""

    name: str
    cache_salt: str | None = None


class RestoreBody(Body):
    """The name of a saved prompt."""

    name: str
    model: str | None = None
    cache_salt: str | None = None


@router.post("/v1/kv/save", openapi_extra=body_schema(SaveBody))
async def save(request: Request, body: Annotated[SaveBody, Depends(parsed(SaveBody))]) -> dict[str, Any]:
    """Compute a prompt, unless cached, and write its keys and values, in pages of 16 tokens, to a file."""
    service, store = await _service(request, body.model)
    began, salt = time.monotonic(), body.cache_salt or ""
    service.check_model(body.model)
    if body.model in service.adapters:
        raise ApiError(400, "model: prompts of adapters are not saved", param="model")
    store.path(body.name)  # checked before the work
    tokens = await tokens_of(service, body)
    count = len(tokens) // PAGE * PAGE
    if not count:
        raise ApiError(400, f"the prompt has {len(tokens)} tokens; expected at least {PAGE}")
    answers = _computed(service, tokens, body.namespace)
    await unless_left(request, answers.whole(), answers.close)
    try:
        kept, states = await asyncio.wrap_future(service.engine.copy_prefix(tokens[:count], body.namespace))
    except MlcpipeError as error:
        raise refused(error) from None
    if not kept:
        raise ApiError(503, "the KV cache had no room to keep the prompt", code="out_of_memory", retry_after_s=5.0)
    nbytes = await service.apart(lambda: store.write(body.name, tokens[:kept], states, salt))
    return _about(body.name, nbytes) | {"tokens": kept, "seconds": time.monotonic() - began}


def _computed(service: Service, tokens: list[int], namespace: str) -> Answers:
    """Answer with one token, which leaves the prompt's pages in the cache. Raises ApiError."""
    room = service.engine.context_length
    if len(tokens) >= room:
        message = f"the prompt has {len(tokens)} tokens; expected less than {room}"
        raise ApiError(400, message, code="context_length_exceeded")
    greedy = SamplingParams(temperature=0.0)
    request = interface.Request(tokens, 1, greedy, namespace=namespace, deterministic=True)
    return service.start([(request, Reading())])


@router.post("/v1/kv/restore", openapi_extra=body_schema(RestoreBody))
async def restore(request: Request, body: Annotated[RestoreBody, Depends(parsed(RestoreBody))]) -> dict[str, Any]:
    """Load a saved prompt's keys and values for prompts that begin with it, as long as the KV cache keeps them."""
    service, store = await _service(request, body.model)
    began, salt = time.monotonic(), body.cache_salt or ""
    saved = await service.apart(lambda: store.read(body.name, salt))
    try:
        await asyncio.wrap_future(service.engine.restore_prefix(saved, body.namespace))
    except MlcpipeError as error:
        raise refused(error) from None
    return _about(body.name, saved.nbytes) | {"tokens": len(saved.tokens), "seconds": time.monotonic() - began}


@router.get("/v1/kv")
async def names(request: Request, model: str | None = None) -> dict[str, Any]:
    """The saved prompts."""
    found = await pool_of(request).apart(_folder(request, model).names)
    return {"object": "list", "data": [_about(name, nbytes) for name, nbytes in found.items()]}


@router.delete("/v1/kv/{name}")
async def delete(request: Request, name: str, model: str | None = None) -> dict[str, Any]:
    """Remove a file; its pages in the KV cache stay."""
    folder = _folder(request, model)
    await pool_of(request).apart(lambda: folder.delete(name))
    return {"id": name, "object": "kv.prefix", "deleted": True}


async def _service(request: Request, model: str | None) -> tuple[Service, PrefixStore]:
    """The service, and the client's store."""
    service = await text_service(request, model)
    if service.prefixes is None:
        raise _not_enabled()
    return service, service.prefixes.of(owner_of(request))


def _folder(request: Request, model: str | None) -> PrefixFolder:
    """The client's folder, whose model need not be loaded. Raises ApiError."""
    found = pool_of(request).find(model, "text")
    folder = found.source.prefixes if found.service is None else found.service.prefixes
    if folder is None:
        raise _not_enabled()
    owned: PrefixFolder = folder.of(owner_of(request))
    return owned


def _not_enabled() -> ApiError:
    message = "no prefixes are saved here: start the server with --prefixes FOLDER"
    return ApiError(404, message, code="not_enabled")


def _about(name: str, nbytes: int) -> dict[str, Any]:
    return {"id": name, "object": "kv.prefix", "bytes": nbytes}
