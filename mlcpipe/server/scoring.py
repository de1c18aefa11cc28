"""Scores of pairs of texts: rerank as Jina, Cohere and TEI have it, score and pooling as vLLM."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse
from numpy.typing import NDArray
from pydantic import Field

from mlcpipe.runtime.text.text_pairs import EncodedText
from mlcpipe.server.bodies import MAX_IDS, Body, EncoderBody, body_schema, parsed
from mlcpipe.server.embedding_service import EmbeddingService
from mlcpipe.server.embeddings import (
    MAX_TEXTS,
    Truncation,
    check_count,
    cut,
    embedded,
    embedded_tokens,
    limit_of,
    numbers,
)
from mlcpipe.server.errors import ApiError
from mlcpipe.server.leases import any_service, embedding_service, pool_of, rerank_service
from mlcpipe.server.mixed_prompts import Prompts, listed_prompts
from mlcpipe.server.sse import unless_left

router = APIRouter()
MAX_CHARS = 32 << 20  # of the texts to score
Floats = NDArray[np.float32]


class Document(Body):
    """A document as an object."""

    text: str


class RerankBody(EncoderBody):
    """The body of a request: `documents`, or `texts` in TEI's form, whose answers differ."""

    query: str
    documents: list[str | Document] | None = None
    model: str | None = None
    top_n: int | None = Field(None, ge=1)
    return_documents: bool | None = None
    truncate_prompt_tokens: Truncation = None
    max_tokens_per_doc: int | None = Field(None, ge=1)
    # TEI's
    texts: list[str] | None = None
    raw_scores: bool | None = None
    return_text: bool | None = None
    truncate: bool | None = None
    truncation_direction: Literal["right", "Right"] | None = None


class ScoreBody(EncoderBody):
    """The body of a request, under either pair of names: one text with each, or the first with the first and so on."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    model: str | None = None
    truncate_prompt_tokens: Truncation = None


class PoolingBody(EncoderBody):
    """The body of a request."""

    most_values = MAX_IDS
    input: Prompts
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1)
    truncate_prompt_tokens: Truncation = None
    task: Literal["embed", "token_embed"] | None = None


@router.post("/v1/rerank", openapi_extra=body_schema(RerankBody), response_model=None)
async def rerank(request: Request, body: Annotated[RerankBody, Depends(parsed(RerankBody))]) -> JSONResponse:
    """The documents that answer a query best, best first."""
    service, found, tokens = await _reranked(request, body)
    if body.texts is not None:
        texts = body.texts if body.return_text else None
        return JSONResponse([{"index": index, "score": score, **({"text": texts[index]} if texts else {})}
                             for index, score in found])  # fmt: skip
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    results = _results(body, found)
    return JSONResponse({"id": _id("rerank"), "model": service.name, "results": results, "usage": usage})


@router.post("/v2/rerank", openapi_extra=body_schema(RerankBody))
async def rerank_cohere(request: Request, body: Annotated[RerankBody, Depends(parsed(RerankBody))]) -> dict[str, Any]:
    """The same in the form of Cohere's second version, where long documents are cut."""
    if body.truncate_prompt_tokens is None:
        body.truncate_prompt_tokens = -1
    _, found, tokens = await _reranked(request, body)
    meta = {"api_version": {"version": "2"}, "tokens": {"input_tokens": tokens}}
    return {"id": _id("rerank"), "results": _results(body, found), "meta": meta}


@router.post("/v1/score", openapi_extra=body_schema(ScoreBody))
@router.post("/score", openapi_extra=body_schema(ScoreBody))
async def score(request: Request, body: Annotated[ScoreBody, Depends(parsed(ScoreBody))]) -> dict[str, Any]:
    """The score of each pair from a cross-encoder, the cosine of their embeddings from other models."""
    pairs = _pairs(body)
    service = await _scorer(request, body.model)
    if service.embedder.info.task == "rerank":
        found, tokens = await _scores(request, service, pairs, body.truncate_prompt_tokens, service.embedder.scores)
    else:
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))  # each once
        rows, tokens = await embedded(request, service, texts, body.truncate_prompt_tokens, most=2 * MAX_TEXTS)
        places = {text: index for index, text in enumerate(texts)}
        ones, others = ([places[pair[side]] for pair in pairs] for side in (0, 1))
        found = _cosines(rows[ones], rows[others])
    data = [{"index": index, "object": "score", "score": float(one)} for index, one in enumerate(found)]
    return {**_listed(service, tokens, "score"), "data": data}


@router.post("/v1/pooling", openapi_extra=body_schema(PoolingBody), response_model=None)
@router.post("/pooling", openapi_extra=body_schema(PoolingBody), response_model=None)
async def pooling(request: Request, body: Annotated[PoolingBody, Depends(parsed(PoolingBody))]) -> JSONResponse:
    """The pooled row of each text, which is its embedding, or with the task `token_embed` those of its tokens."""
    service = await embedding_service(request, body.model)
    texts, truncate = listed_prompts(body.input), body.truncate_prompt_tokens
    made: Sequence[Floats]
    if body.task == "token_embed":
        if body.dimensions is not None:
            raise ApiError(400, "dimensions: not with token_embed; leave it out", param="dimensions")
        made, tokens = await embedded_tokens(request, service, texts, truncate)
    else:
        rows, tokens = await embedded(request, service, texts, truncate, dimensions=body.dimensions)
        made = list(rows)

    def respond() -> JSONResponse:
        data = [{"index": index, "object": "pooling", "data": numbers(row, body.encoding_format)}
                for index, row in enumerate(made)]  # fmt: skip
        return JSONResponse({**_listed(service, tokens, "pool"), "data": data})

    return await service.apart(respond, sum(one.nbytes for one in made))


async def _reranked(request: Request, body: RerankBody) -> tuple[EmbeddingService, list[tuple[int, float]], int]:
    """Documents by number with their scores, best first, and the count of tokens. Raises ApiError."""
    given = body.documents if body.texts is None else body.texts
    if given is None or (body.texts is not None and body.documents is not None):
        raise ApiError(400, "documents: expected a list of them, or texts in its place", param="documents")
    service = await rerank_service(request, body.model)
    documents = [one if isinstance(one, str) else one.text for one in given]
    limit = -1 if body.truncate and body.truncate_prompt_tokens is None else body.truncate_prompt_tokens
    finish: Callable[[Floats], Floats] = (lambda rows: rows[:, 0]) if body.raw_scores else service.embedder.scores
    pairs = [(body.query, one) for one in documents]
    scores, tokens = await _scores(request, service, pairs, limit, finish, body.max_tokens_per_doc)
    best = sorted(range(len(scores)), key=lambda index: (-scores[index], index))[: body.top_n]
    return service, [(index, float(scores[index])) for index in best], tokens


async def _scores(
    request: Request,
    service: EmbeddingService,
    pairs: Sequence[tuple[str, str]],
    truncate: int | None,
    finish: Callable[[Floats], Floats],
    most_tokens: int | None = None,
) -> tuple[Floats, int]:
    """`finish` of the rows f32[n, width] of pairs, and the count of tokens. The second texts are cut after
    `most_tokens` of their own. Raises ApiError.
    """
    embedder = service.embedder
    check_count(len(pairs), "documents")
    limit = limit_of(embedder, truncate)
    if (chars := sum(len(one) + len(other) for one, other in pairs)) > MAX_CHARS:
        message = f"query, documents: expected at most {MAX_CHARS} characters, the query with each, found {chars}"
        raise ApiError(400, message, param="query")

    def encode(pair: tuple[str, str]) -> EncodedText:
        second = pair[1] if most_tokens is None else _first_tokens(service, pair[1], most_tokens)
        return embedder.encode_pairs(cut(service, pair[0], limit), [cut(service, second, limit)], truncate=limit)[0]

    return await unless_left(request, service.rows(pairs, encode, finish), lambda: None)


async def _scorer(request: Request, model: str | None) -> EmbeddingService:
    """The model of this name, or else the first that scores pairs, or embeds. Raises ApiError."""
    models = pool_of(request).models
    if model is None:
        model = next((one.name for kind in ("rerank", "embed") for one in models if one.kind == kind), None)
    if (known := pool_of(request).find(model)).kind in ("text", "speech"):  # before it is loaded
        raise _not_for_scores(known.name)
    service = await any_service(request, model)
    if not isinstance(service, EmbeddingService):
        raise _not_for_scores(service.name)
    return service


def _not_for_scores(name: str) -> ApiError:
    return ApiError(400, f"the model {name!r} is no encoder; score needs one", code="unsupported_task")


def _pairs(body: ScoreBody) -> list[tuple[str, str]]:
    """Raises ApiError for texts that do not pair."""
    first = body.queries if body.text_1 is None else body.text_1
    second = body.documents if body.text_2 is None else body.text_2
    if first is None or second is None:
        raise ApiError(400, "text_1, text_2: expected texts", param="text_1")
    seconds = [second] if isinstance(second, str) else second
    firsts = [first] * len(seconds) if isinstance(first, str) else first
    if len(firsts) == 1:
        firsts = firsts * len(seconds)
    check_count(len(seconds), "text_2")
    if len(firsts) != len(seconds):
        message = f"text_1: expected one text, or as many as text_2 has, {len(seconds)}; found {len(firsts)}"
        raise ApiError(400, message, param="text_1")
    return list(zip(firsts, seconds))


def _cosines(ones: Floats, others: Floats) -> Floats:
    lengths = np.linalg.norm(ones, axis=1) * np.linalg.norm(others, axis=1)
    cosines: Floats = (ones * others).sum(axis=1) / np.maximum(lengths, np.float32(1e-12))
    return cosines


def _first_tokens(service: EmbeddingService, text: str, most: int) -> str:
    """The text up to the end of this token."""
    offsets = service.tokenizer.encoding(text[: service.tokenizer.most_chars]).offsets
    return text if len(offsets) <= most else text[: offsets[most - 1][1]]


def _results(body: RerankBody, found: Sequence[tuple[int, float]]) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = [{"index": index, "relevance_score": score} for index, score in found]
    if body.return_documents and body.documents is not None:
        texts = [one if isinstance(one, str) else one.text for one in body.documents]
        results = [{**one, "document": {"text": texts[one["index"]]}} for one in results]
    return results


def _listed(service: EmbeddingService, tokens: int, kind: str) -> dict[str, Any]:
    usage = {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0, "prompt_tokens_details": None}
    return {"id": _id(kind), "object": "list", "created": int(time.time()), "model": service.name, "usage": usage}


def _id(kind: str) -> str:
    return f"{kind}-{secrets.token_hex(12)}"
