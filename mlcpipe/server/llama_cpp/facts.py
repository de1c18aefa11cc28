"""llama-server's `/props`, `/slots` and `/apply-template`."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request

from mlcpipe.server.bodies import body_schema, parsed
from mlcpipe.server.errors import ApiError
from mlcpipe.server.leases import pool_of, text_service
from mlcpipe.server.model_card import card_of
from mlcpipe.server.service import DEFAULTS, Service
from mlcpipe.server.tokenize import PromptFields, tokens_of
from mlcpipe.version import __version__

router = APIRouter()


@router.get("/props")
async def props(request: Request) -> dict[str, Any]:
    """Facts of the server and its model, which sleeps if it is not loaded, and is not loaded for this; `model` in the
    query names one, an adapter too.
    """
    name, pool = request.query_params.get("model"), pool_of(request)
    model = pool.find(name, "text")
    card = await card_of(pool, model)
    own, special, service = card.defaults or DEFAULTS, card.special_tokens, model.service
    params = {
        "n_predict": -1, "temperature": own.temperature, "top_k": own.top_k, "top_p": own.top_p, "min_p": own.min_p,
        "repeat_penalty": own.repetition_penalty, "seed": -1 if own.seed is None else own.seed,
    }  # fmt: skip
    return {
        "default_generation_settings": {"n_ctx": card.about.get("context_length", 0), "params": params},
        "total_slots": 0 if service is None else _slots(service),
        "model_alias": name if name in model.adapter_names else model.name,
        "model_path": model.name,
        "chat_template": card.template,
        "chat_template_caps": {},
        "modalities": {"vision": "vision" in card.capabilities, "audio": False},
        "bos_token": special.get("bos_token") or "",
        "eos_token": special.get("eos_token") or "",
        "build_info": f"mlcpipe {__version__}",
        "is_sleeping": service is None,
    }


@router.get("/slots")
async def slots(request: Request) -> list[dict[str, Any]]:
    """As many slots as conversations of the whole context fit the KV cache; the first ones work. More requests may run
    at once, as they share its pages. A model that is not loaded has none, and is not loaded for this.
    """
    service = pool_of(request).find(request.query_params.get("model"), "text").service
    if service is None:
        return []
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
