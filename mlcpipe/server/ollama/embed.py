"""`/api/embed`, and `/api/embeddings`, the older path for one text."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse

from mlcpipe.server.bodies import body_schema, parsed
from mlcpipe.server.embedding_service import EmbeddingService
from mlcpipe.server.embeddings import embedded
from mlcpipe.server.errors import ApiError
from mlcpipe.server.leases import embedding_service, pool_of
from mlcpipe.server.ollama.bodies import LOAD_OPTIONS, EmbedBody
from mlcpipe.server.ollama.naming import keep, served

router = APIRouter()
_OF_ANSWERS = {"num_ctx", "num_predict"}  # options that no embedding depends on, and clients send all the same


@router.post("/api/embed", openapi_extra=body_schema(EmbedBody), response_model=None)
async def embed(request: Request, body: Annotated[EmbedBody, Depends(parsed(EmbedBody))]) -> JSONResponse:
    """An embedding of length 1 for each text, as far as the model makes them so; texts are cut at its limit."""
    began_ns = time.monotonic_ns()
    service = await _service(request, body)
    load_ns = time.monotonic_ns() - began_ns
    if body.input is None:
        raise ApiError(400, "input: expected a text, or a list of texts", param="input")
    texts = [body.input] if isinstance(body.input, str) else body.input
    rows, tokens = await _rows(request, service, body, texts)

    def respond() -> JSONResponse:
        return JSONResponse({
            "model": body.named, "embeddings": [row.tolist() for row in rows],
            "total_duration": time.monotonic_ns() - began_ns, "load_duration": load_ns, "prompt_eval_count": tokens,
        })  # fmt: skip

    made: JSONResponse = await service.apart(respond, rows.nbytes)
    return made


@router.post("/api/embeddings", openapi_extra=body_schema(EmbedBody), response_model=None)
async def embeddings(request: Request, body: Annotated[EmbedBody, Depends(parsed(EmbedBody))]) -> JSONResponse:
    """The embedding of one text."""
    if body.prompt is None:
        raise ApiError(400, "prompt: expected a text", param="prompt")
    rows, _ = await _rows(request, await _service(request, body), body, [body.prompt])
    return JSONResponse({"embedding": rows[0].tolist()})


async def _service(request: Request, body: EmbedBody) -> EmbeddingService:
    model = served(pool_of(request), body.named)
    service = await embedding_service(request, model)
    keep(request, body, model)
    return service


async def _rows(request: Request, service: EmbeddingService, body: EmbedBody, texts: list[str]) -> tuple[Any, int]:
    """The embeddings, and the tokens of all texts. Raises ApiError."""
    for name, value in (body.options or {}).items():
        if value is not None and name not in LOAD_OPTIONS | _OF_ANSWERS:
            raise ApiError(400, f"options.{name}: no embedding depends on it; leave it out", param=f"options.{name}")
    truncate = None if body.truncate is False else -1
    return await embedded(request, service, texts, truncate, dimensions=body.dimensions)
