"""llama-server's `/lora-adapters`: the loaded adapters, and the scale that they have where a request says nothing."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from pydantic import Field, model_validator

from mlcpipe.server.bodies import MAX_LORA, Body, LoraScale, body_schema, key_of, parsed
from mlcpipe.server.leases import pool_of, text_service
from mlcpipe.server.lora_scales import scales_of

router = APIRouter()


class AdaptersBody(Body):
    """The body of a request, which is a list."""

    adapters: list[LoraScale] = Field(max_length=MAX_LORA)

    @model_validator(mode="before")
    @classmethod
    def _listed(cls, data: Any) -> Any:
        return {"adapters": data} if isinstance(data, list) else data


@router.get("/lora-adapters")
async def adapters(request: Request) -> list[dict[str, Any]]:
    """The adapters of the model, or of the one that `model` in the query names, which is not loaded for this.

    Their ids are their places. `path` is the name by which requests choose one as their model.
    """
    model = pool_of(request).find(request.query_params.get("model"), "text")
    scales = {} if model.service is None else model.service.lora.defaults(key_of(request))
    return [
        {"id": index, "path": name, "scale": scales.get(name, 0.0), "task_name": "", "prompt_prefix": ""}
        for index, name in enumerate(model.adapter_names)
    ]


@router.post("/lora-adapters", openapi_extra=body_schema(AdaptersBody))
async def scale(request: Request, body: Annotated[AdaptersBody, Depends(parsed(AdaptersBody))]) -> dict[str, bool]:
    """Set the scales of all adapters for requests of the same client; those that are not named get 0."""
    service = await text_service(request, request.query_params.get("model"))
    service.lora.set_defaults(body.client, scales_of(service, body.adapters, "adapters"))
    return {"success": True}
