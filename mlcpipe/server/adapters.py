"""`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, as vLLM names them: LoRA adapters while the server runs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Depends, Request
from fastapi.responses import PlainTextResponse

from mlcpipe.errors import MlcpipeError
from mlcpipe.files import local_path
from mlcpipe.server.bodies import Body, body_schema, parsed
from mlcpipe.server.errors import ApiError, refused
from mlcpipe.server.service import Service

router = APIRouter()


class LoadBody(Body):
    """The name that requests choose the adapter by, and its folder on the server's machine."""

    lora_name: str
    lora_path: str


class UnloadBody(Body):
    """The name of a loaded adapter."""

    lora_name: str


@router.post("/v1/load_lora_adapter", openapi_extra=body_schema(LoadBody))
async def load(request: Request, body: Annotated[LoadBody, Depends(parsed(LoadBody))]) -> PlainTextResponse:
    """Have requests choose an adapter by the name of its model."""
    service, name = _service(request), body.lora_name
    service.check_free(name)
    folder = local_path(body.lora_path)
    if folder is None or not Path(folder).is_dir():
        raise ApiError(400, f"lora_path: no folder {body.lora_path[:200]!r}", param="lora_path")
    packed = await service.apart(lambda: service.engine.read_adapter(folder, name))
    service.check_free(name)  # another client may have been faster
    service.loading.add(name)
    try:
        service.adapters[name] = await asyncio.wrap_future(service.engine.load_adapter(packed))
    except MlcpipeError as error:
        raise refused(error) from None
    finally:
        service.loading.discard(name)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


@router.post("/v1/unload_lora_adapter", openapi_extra=body_schema(UnloadBody))
async def unload(request: Request, body: Annotated[UnloadBody, Depends(parsed(UnloadBody))]) -> PlainTextResponse:
    """Refuse new requests for an adapter; those under way end with it."""
    service, name = _service(request), body.lora_name
    adapter = service.adapters.pop(name, None)
    if adapter is None:
        raise ApiError(404, f"the adapter {name[:100]!r} is not loaded", code="model_not_found", param="lora_name")
    service.engine.unload_adapter(adapter)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


def _service(request: Request) -> Service:
    """The service, for servers whose clients have a key: the path of a folder is not for everybody to try."""
    if not request.app.state.has_keys:
        raise ApiError(403, "adapters are loaded by clients with a key alone: start the server with --api-key")
    service: Service = request.app.state.service
    return service
