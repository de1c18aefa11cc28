"""`/v1/embeddings`, as OpenAI has it."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse
from numpy.typing import NDArray
from pydantic import Field

from mlcpipe.runtime.embedder import Embedder
from mlcpipe.runtime.text.text_pairs import EncodedText
from mlcpipe.server.bodies import MAX_IDS, EncoderBody, body_schema, parsed
from mlcpipe.server.embedding_service import EmbeddingService
from mlcpipe.server.errors import ApiError
from mlcpipe.server.leases import embedding_service
from mlcpipe.server.mixed_prompts import Prompts, listed_prompts, mixed_ids, text_in
from mlcpipe.server.sse import unless_left

router = APIRouter()
MAX_TEXTS = 2048  # per request, as OpenAI
MAX_NUMBERS = 1 << 21  # of a response with embeddings of tokens, some 40 MiB of JSON
Truncation = Annotated[int | None, Field(ge=-1)]


class EmbeddingBody(EncoderBody):
    """The body of a request. `truncate_prompt_tokens` is vLLM's: -1 cuts at the model's limit."""

    most_values = MAX_IDS
    input: Prompts
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1)
    user: str | None = None
    truncate_prompt_tokens: Truncation = None
    prompt_name: str | None = None
    pooling: Any = None  # llama-server has `none` on another path


@router.post("/v1/embeddings", openapi_extra=body_schema(EmbeddingBody), response_model=None)
async def embeddings(request: Request, body: Annotated[EmbeddingBody, Depends(parsed(EmbeddingBody))]) -> JSONResponse:
    """An embedding for each text."""
    if body.pooling is not None:
        message = "pooling: not offered here; ask /embedding, or /pooling with the task token_embed"
        raise ApiError(400, message, param="pooling", code="unsupported_parameter")
    service = await embedding_service(request, body.model)
    rows, tokens = await embedded(
        request,
        service,
        listed_prompts(body.input),
        body.truncate_prompt_tokens,
        dimensions=body.dimensions,
        prompt_name=body.prompt_name,
    )

    def respond() -> JSONResponse:
        made = [numbers(row, body.encoding_format) for row in rows]
        data = [{"object": "embedding", "index": index, "embedding": one} for index, one in enumerate(made)]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return JSONResponse({"object": "list", "data": data, "model": service.name, "usage": usage})

    return await service.apart(respond, rows.nbytes)


async def embedded(
    request: Request,
    service: EmbeddingService,
    texts: Sequence[Any],
    truncate: int | None,
    *,
    dimensions: int | None = None,
    prompt_name: str | None = None,
    most: int = MAX_TEXTS,
) -> tuple[NDArray[np.float32], int]:
    """The embeddings f32[n, dimensions] of texts, or of their tokens, and the count of all tokens.

    `truncate` is as `EmbeddingBody.truncate_prompt_tokens`. Raises ApiError.
    """
    embedder = service.embedder
    check_count(len(texts), "input", most)
    whole = embedder.info.dimensions
    if dimensions is not None and dimensions > whole:
        raise ApiError(400, f"dimensions: expected from 1 to {whole}", param="dimensions")
    encode = encoder(service, truncate, prompt_name)
    work = service.rows(texts, encode, partial(embedder.finished, dimensions=dimensions))
    return await unless_left(request, work, lambda: None)


async def embedded_tokens(
    request: Request, service: EmbeddingService, texts: Sequence[Any], truncate: int | None
) -> tuple[list[NDArray[np.float32]], int]:
    """The rows f32[t, width] of the tokens of each text, before pooling, not normalized, and the count of all tokens.

    Raises ApiError, also for more than `MAX_NUMBERS` numbers together.
    """
    embedder, sizes, total = service.embedder, list[int](), 0
    check_count(len(texts), "input")
    encode, most = encoder(service, truncate, None), MAX_NUMBERS // embedder.info.dimensions

    def counted(text: Any) -> EncodedText:
        nonlocal total
        made = encode(text)
        sizes.append(len(made.ids))
        total += len(made.ids)
        if total > most:
            message = f"input: expected at most {most} tokens, each of which has an embedding; send fewer texts"
            raise ApiError(400, message, param="input")
        return made

    work = service.rows(texts, counted, lambda rows: rows, embedder.token_rows)
    rows, tokens = await unless_left(request, work, lambda: None)
    return np.split(rows, np.cumsum(sizes)[:-1]), tokens


def encoder(service: EmbeddingService, truncate: int | None, prompt_name: str | None) -> Callable[[Any], EncodedText]:
    """From a text, tokens, or both mixed, to tokens; the function raises ApiError and the errors of mlcpipe."""
    embedder = service.embedder
    limit = limit_of(embedder, truncate)

    def encode(text: Any) -> EncodedText:
        if isinstance(text, dict):
            text = text_in(text, "input")
        if isinstance(text, str):
            return embedder.encode(cut(service, text, limit), prompt_name=prompt_name, truncate=limit)
        if isinstance(text, list) and all(type(one) is int for one in text):
            return embedder.encode(text, truncate=limit)
        return embedder.encode(mixed_ids(service.tokenizer, text, "input"), truncate=limit)

    return encode


def check_count(count: int, param: str, most: int = MAX_TEXTS) -> None:
    """Raises ApiError for a list of no texts, or too many."""
    if not 0 < count <= most:
        raise ApiError(400, f"{param}: expected 1 to {most} texts, found {count}", param=param)


def cut(service: EmbeddingService, text: str, limit: int | None) -> str:
    """Cut a text at the most characters that are encoded, if it is to be truncated."""
    return text if limit is None else text[: service.tokenizer.most_chars]


def limit_of(embedder: Embedder, wanted: int | None) -> int | None:
    """The number of tokens to cut texts at; None refuses texts beyond the model's limit. Raises ApiError."""
    most = embedder.max_tokens
    if wanted == 0 or (wanted is not None and wanted > most):
        message = f"truncate_prompt_tokens: expected -1, or from 1 to {most}"
        raise ApiError(400, message, param="truncate_prompt_tokens")
    return most if wanted == -1 else wanted


def numbers(row: Any, form: str | None) -> list[float] | str:
    """The numbers, or their little-endian float32 bytes in base64."""
    if form == "base64":
        return base64.b64encode(np.ascontiguousarray(row, "<f4").tobytes()).decode()
    numbers: list[float] = row.tolist()
    return numbers
