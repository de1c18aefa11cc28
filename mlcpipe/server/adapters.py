"""`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, as vLLM names them: LoRA adapters while the server runs."""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Depends, Request
from fastapi.responses import PlainTextResponse

from mlcpipe.checkpoint.peft import CONFIG
from mlcpipe.errors import MlcpipeError
from mlcpipe.server.bodies import Body, body_schema, parsed
from mlcpipe.server.errors import ApiError, refused
from mlcpipe.server.leases import pool_of, text_service
from mlcpipe.server.service import Service
from mlcpipe.support.files import local_path

router = APIRouter()


class LoadBody(Body):
    """The adapter's name in requests, and its folder on the server's machine."""

    lora_name: str
    lora_path: str
    base_model_name: str | None = None


class UnloadBody(Body):
    """The name of a loaded adapter."""

    lora_name: str


@router.post("/v1/load_lora_adapter", openapi_extra=body_schema(LoadBody))
async def load(request: Request, body: Annotated[LoadBody, Depends(parsed(LoadBody))]) -> PlainTextResponse:
    """Load an adapter, which requests then choose as their model."""
    service, name = await _service(request, body.base_model_name), body.lora_name
    try:
        service.engine.check_adapters()
    except MlcpipeError as error:
        raise refused(error) from None
    service.check_free(name)
    if any(name in one.source.names or name in one.adapter_names for one in pool_of(request).models):
        raise ApiError(400, f"lora_name: there is a model {name!r} already", param="lora_name")
    folder = await service.apart(lambda: _folder(body.lora_path, request.app.state.rules.adapter_folders))
    packed = await service.apart(lambda: service.engine.read_adapter(folder, name))
    service.check_free(name)  # another client may have been faster
    service.loading.add(name)
    try:
        service.adapters[name] = await service.lora.load(service, packed)
    finally:
        service.loading.discard(name)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


@router.post("/v1/unload_lora_adapter", openapi_extra=body_schema(UnloadBody))
async def unload(request: Request, body: Annotated[UnloadBody, Depends(parsed(UnloadBody))]) -> PlainTextResponse:
    """Unload an adapter: refuse new requests; running ones finish with it."""
    name = body.lora_name
    owner = next((one.name for one in pool_of(request).models if name in one.adapter_names), None)
    service = await _service(request, owner)
    adapter = service.adapters.pop(name, None)
    if adapter is None:
        raise ApiError(404, f"the adapter {name[:100]!r} is not loaded", code="model_not_found", param="lora_name")
    service.engine.unload_adapter(adapter)
    service.lora.forget(service, name, adapter.serial)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


def _folder(path: str, allowed: Collection[Path] | None) -> Path:
    """The folder of an adapter. Raises the same ApiError for anything else, so clients learn of no other files."""
    given = local_path(path)
    with suppress(OSError, ValueError):
        folder = Path(os.path.realpath(given or "/"))
        inside = allowed is None or any(folder.is_relative_to(os.path.realpath(one)) for one in allowed)
        if given is not None and inside and (folder / CONFIG).is_file():
            return folder
    raise ApiError(400, "lora_path: expected the folder of an adapter that clients may load", param="lora_path")


async def _service(request: Request, model: str | None) -> Service:
    """The service, on servers with API keys only: not everybody may probe paths."""
    if not request.app.state.rules.keys:
        raise ApiError(403, "adapters are loaded by clients with a key alone: start the server with --api-key")
    return await text_service(request, model)
