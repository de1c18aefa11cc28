"""llama-server's `/embedding`: rows of texts under a norm of the request, or of all their tokens."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse
from numpy.typing import NDArray
from pydantic import Field

from mlcpipe.server.bodies import MAX_IDS, Count, EncoderBody, body_schema, parsed
from mlcpipe.server.embeddings import check_count, embedded_tokens, encoder, numbers
from mlcpipe.server.errors import ApiError
from mlcpipe.server.leases import embedding_service
from mlcpipe.server.mixed_prompts import Prompts, listed_prompts
from mlcpipe.server.sse import unless_left

router = APIRouter()
_EUCLIDEAN, _INT16 = 2, 32760.0
_MOST_NORM = 64
Floats = NDArray[np.float32]


class EmbeddingBody(EncoderBody):
    """The body of a request. `pooling` stands for llama-server's option: `none` gives the rows of all tokens."""

    most_values = MAX_IDS
    content: Prompts | None = None
    input: Prompts | None = None
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    embd_normalize: Count | None = Field(None, ge=-1, le=_MOST_NORM)
    pooling: Literal["none"] | None = None


@router.post("/embedding", openapi_extra=body_schema(EmbeddingBody), response_model=None)
async def embedding(request: Request, body: Annotated[EmbeddingBody, Depends(parsed(EmbeddingBody))]) -> JSONResponse:
    """A list of rows for each text: one, or those of its tokens."""
    service = await embedding_service(request, body.model)
    given = body.input if body.content is None else body.content
    if given is None or (body.input is not None and body.content is not None):
        raise ApiError(400, "content: expected a text, tokens, a list of such, or input alone", param="content")
    texts = listed_prompts(given)
    if body.pooling == "none":
        parts, _ = await embedded_tokens(request, service, texts, None)
        norm = -1 if body.embd_normalize is None else body.embd_normalize
    else:
        check_count(len(texts), "content")
        norm = _EUCLIDEAN if body.embd_normalize is None else body.embd_normalize
        work = service.rows(texts, encoder(service, None, None), lambda rows: rows)
        rows, _ = await unless_left(request, work, lambda: None)
        parts = list(rows[:, None])

    def respond() -> JSONResponse:
        made = [[numbers(row, body.encoding_format) for row in normalized(part, norm)] for part in parts]
        return JSONResponse([{"index": index, "embedding": one} for index, one in enumerate(made)])

    return await service.apart(respond, sum(part.nbytes for part in parts))


def normalized(rows: Floats, norm: int) -> Floats:
    """Rows f32[n, width] of length 1 in the p-norm `norm`, as llama.cpp's `common_embd_normalize` has it.

    -1 leaves them; 0 makes the largest number of each 32760.
    """
    if norm < 0:
        return rows
    sizes = np.abs(rows.astype(np.float64))
    largest = sizes.max(axis=1, keepdims=True)
    shares = sizes / np.where(largest > 0, largest, 1)  # so that no power leaves float64
    lengths = largest / _INT16 if norm == 0 else largest * (shares**norm).sum(axis=1, keepdims=True) ** (1 / norm)
    made: Floats = (rows / np.where(lengths > 0, lengths, 1)).astype(np.float32)
    return made
