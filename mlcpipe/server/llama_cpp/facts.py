"""llama-server's `/props`, `/slots` and `/apply-template`."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request

from mlcpipe.server.bodies import body_schema, parsed
from mlcpipe.server.errors import ApiError
from mlcpipe.server.leases import text_service
from mlcpipe.server.service import Service
from mlcpipe.server.tokenize import PromptFields, tokens_of
from mlcpipe.version import __version__

router = APIRouter()


@router.get("/props")
async def props(request: Request) -> dict[str, Any]:
    """Facts of the server and its model; `model` in the query names one, an adapter too."""
    name = request.query_params.get("model")
    service = await text_service(request, name)
    own, special = service.facts.defaults, service.tokenizer.special_tokens
    params = {
        "n_predict": -1, "temperature": own.temperature, "top_k": own.top_k, "top_p": own.top_p, "min_p": own.min_p,
        "repeat_penalty": own.repetition_penalty, "seed": -1 if own.seed is None else own.seed,
    }  # fmt: skip
    return {
        "default_generation_settings": {"n_ctx": service.engine.context_length, "params": params},
        "total_slots": _slots(service),
        "model_alias": service.name_of(name),
        "model_path": service.name,
        "chat_template": service.tokenizer.chat_templates.get("default", ""),
        "chat_template_caps": {},
        "modalities": {"vision": service.facts.vision is not None, "audio": False},
        "bos_token": special.get("bos_token") or "",
        "eos_token": special.get("eos_token") or "",
        "build_info": f"mlcpipe {__version__}",
        "is_sleeping": False,
    }


@router.get("/slots")
async def slots(request: Request) -> list[dict[str, Any]]:
    """As many slots as conversations of the whole context fit the KV cache; the first ones work. More requests may run
    at once, as they share its pages.
    """
    service = await text_service(request, request.query_params.get("model"))
    running = service.engine.stats().running
    return [
        {"id": index, "n_ctx": service.engine.context_length, "speculative": False, "is_processing": index < running}
        for index in range(max(_slots(service), running))
    ]


@router.post("/apply-template", openapi_extra=body_schema(PromptFields))
async def apply_template(
    request: Request, body: Annotated[PromptFields, Depends(parsed(PromptFields))]
) -> dict[str, str]:
    """The prompt of a conversation as text, control tokens by name."""
    service = await text_service(request, body.model)
    if body.messages is None:
        raise ApiError(400, "messages: expected a conversation", param="messages")
    tokens = await tokens_of(service, body)
    return {"prompt": await service.apart(lambda: service.tokenizer.decode(tokens, skip_special_tokens=False))}


def _slots(service: Service) -> int:
    return max(1, service.engine.kv_tokens // service.engine.context_length)
