"""`/v1/chat/completions`, as in OpenAI's API reference."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse
from pydantic import Field, model_validator

from mlcpipe.runtime.sampling_params import MAX_LOGPROBS, CallPiece, TokenLogprob
from mlcpipe.runtime.tools import choice_of
from mlcpipe.server.answers import Answer, Delta, DeltaSource, Usage
from mlcpipe.server.bodies import (
    CompletionFields,
    Count,
    EndingFields,
    Prediction,
    ResponseFormat,
    body_schema,
    parsed,
)
from mlcpipe.server.conversation import (
    Conversation,
    answers_to,
    ending_of,
    prompt_of,
)
from mlcpipe.server.errors import ApiError
from mlcpipe.server.leases import text_service
from mlcpipe.server.samplers import with_samplers
from mlcpipe.server.semantic_cache import CachingService, Keeping
from mlcpipe.server.service import Service
from mlcpipe.server.sse import DONE, EventStream, choice_events, event, unless_left
from mlcpipe.server.thinking import ThinkingFields
from mlcpipe.server.timings import PromptProgress, timings

router = APIRouter()


class ChatBody(CompletionFields, EndingFields, ThinkingFields):
    """The body of a request."""

    messages: list[dict[str, Any]]
    max_completion_tokens: Count | None = Field(None, ge=-1)
    logprobs: bool | None = None
    top_logprobs: Count | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    prediction: Prediction | None = None
    # llama-server's, which become others.
    n_predict: Count | None = None
    samplers: list[str] | str | None = None
    # Fields about storage or billing at OpenAI.
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    # Refused by name.
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None
    functions: list[Any] | None = None
    function_call: Any = None
    web_search_options: Any = None

    @model_validator(mode="before")
    @classmethod
    def _llama_server_s(cls, data: Any) -> Any:
        return with_samplers(data)


@router.post("/v1/chat/completions", openapi_extra=body_schema(ChatBody), response_model=None)
async def chat(request: Request, body: Annotated[ChatBody, Depends(parsed(ChatBody))]) -> EventStream | JSONResponse:
    """Answer a conversation."""
    service = await text_service(request, body.model)
    conversation = await service.aside(lambda: _conversation(body), body.nbytes)
    answers, headers = await _answers(service, request, body, conversation)
    frame = {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "created": int(time.time()),
        "model": service.name_of(body.model),
        "system_fingerprint": service.facts.fingerprint,
    }
    if body.stream:
        chunks = _chunks(answers, frame, body)
        return EventStream(chunks, answers.close, lambda error: event(error.body("")) + DONE, headers=headers)
    whole = await unless_left(request, answers.whole(), answers.close)
    choices = [_choice(index, answer, with_logprobs=bool(body.logprobs)) for index, answer in enumerate(whole)]

    def made() -> JSONResponse:
        return JSONResponse(
            {**frame, "object": "chat.completion", "choices": choices, "usage": usage_json(answers.usage),
             "timings": timings(answers.usage), **prompt_json(answers, 0)},
            headers=headers,
        )  # fmt: skip

    return await service.aside(made, answers.scores_bytes)


@router.post("/v1/chat/completions/input_tokens", openapi_extra=body_schema(ChatBody))
async def input_tokens(request: Request, body: Annotated[ChatBody, Depends(parsed(ChatBody))]) -> dict[str, Any]:
    """The tokens of a conversation, as llama-server counts them."""
    service = await text_service(request, body.model)
    service.check(body)
    conversation = await service.aside(lambda: _conversation(body), body.nbytes)
    prompt = await prompt_of(service, conversation, body.nbytes)
    return {"object": "response.input_tokens", "input_tokens": len(prompt.tokens)}


async def _answers(
    service: Service, request: Request, body: ChatBody, conversation: Conversation
) -> tuple[DeltaSource, dict[str, str]]:
    """Answers, cached ones if a semantic cache has them, and the header that says so."""
    cache = service.semantic_cache if isinstance(service, CachingService) else None
    adapter, question = service.adapter_of(body.model), None
    if cache is not None and body.lora is None and not service.lora.defaults(body.client):
        question = await cache.question(request, body, conversation, adapter)
    if cache is None or question is None:
        return await answers_to(service, body, conversation), {}
    if (kept := cache.find(question)) is not None:
        return kept, {"x-cache": "hit"}
    return Keeping(await answers_to(service, body, conversation), cache, question), {"x-cache": "miss"}


def _conversation(body: ChatBody) -> Conversation:
    for name in ("audio", "functions", "function_call", "web_search_options"):
        if getattr(body, name) is not None:
            raise ApiError(400, f"{name}: not supported", param=name, code="unsupported_parameter")
    if body.modalities is not None and body.modalities != ["text"]:
        raise ApiError(400, "modalities: expected text alone", param="modalities", code="unsupported_parameter")
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs: expected logprobs to be true", param="top_logprobs")
    thoughts = body.thoughts()
    most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return Conversation(
        body.messages,
        choice_of(body.tools or (), body.tool_choice, parallel=body.parallel_tool_calls is not False),
        {**thoughts.variables, **(body.chat_template_kwargs or {})},
        body.response_format,
        most,
        (body.top_logprobs or 0) if body.logprobs else None,
        body.stops,
        body.n or 1,
        None if body.prediction is None else body.prediction.text,
        ending_of(body, body.messages),
        thoughts=thoughts,
        prompt_logprobs=body.prompt_logprobs,
    )


async def _chunks(answers: DeltaSource, frame: dict[str, Any], body: ChatBody) -> AsyncIterator[str]:
    """The events of a stream."""
    with_usage, timed = body.tells_usage, bool(body.timings_per_token)
    frame = {**frame, "object": "chat.completion.chunk", **({"usage": None} if with_usage else {})}
    made = choice_events(frame)
    progress = {index: PromptProgress(size) for index, size in answers.prompt_sizes.items()}
    ended = 0

    def chunk(index: int, delta: dict[str, Any], logprobs: object = None, finish: str | None = None) -> str:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        last = finish is not None and ended == answers.count and not with_usage
        more: dict[str, Any] = {"timings": timings(answers.usage)} if last or (timed and "role" not in delta) else {}
        if body.tells_usage_so_far:
            more["usage"] = usage_json(answers.usage)
        return event({**frame, "choices": [choice], **more}) if more else made(choice)

    for index in range(body.n or 1):
        yield chunk(index, {"role": "assistant", "content": ""})
    async for one in answers.deltas():
        told = progress[one.index].told(one, timed=timed) if one.index in progress else None
        if told is not None:
            choice = {"index": one.index, "delta": {}, "logprobs": None, "finish_reason": None}
            yield event({**frame, "choices": [choice], **told})
        delta = _delta_json(one)
        logprobs = _logprobs(one.logprobs) if one.logprobs else None
        if delta or logprobs:
            yield chunk(one.index, delta, logprobs)
        if one.finish is not None:
            ended += 1
            yield chunk(one.index, {}, None, one.finish)
    if with_usage:
        yield event({**frame, "choices": [], "usage": usage_json(answers.usage), "timings": timings(answers.usage)})
    yield DONE


def _delta_json(delta: Delta) -> dict[str, Any]:
    out: dict[str, Any] = {}
    if delta.text:
        out["content"] = delta.text
    if delta.reasoning:
        out["reasoning_content"] = delta.reasoning
    if delta.calls:
        out["tool_calls"] = [_call_piece(piece) for piece in delta.calls]
    return out


def _call_piece(piece: CallPiece) -> dict[str, Any]:
    kind, text = ("custom", "input") if piece.custom else ("function", "arguments")
    if piece.name is None:
        return {"index": piece.index, kind: {text: piece.arguments}}
    called = {"name": piece.name, text: piece.arguments}
    return {"index": piece.index, "id": piece.id, "type": kind, kind: called}


def _choice(index: int, answer: Answer, *, with_logprobs: bool) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["content"] = answer.text or None
        message["tool_calls"] = [call.described() for call in answer.calls]
    logprobs = _logprobs(answer.logprobs) if with_logprobs else None
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": answer.finish}


def _logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    return {
        "content": [{**_token(one), "top_logprobs": [_token(other) for other in one.top]} for one in tokens],
        "refusal": None,
    }


def _token(one: TokenLogprob) -> dict[str, Any]:
    return {"token": one.text, "logprob": one.logprob, "bytes": list(one.bytes)}


def prompt_json(answers: DeltaSource, index: int) -> dict[str, Any]:
    """vLLM's `prompt_logprobs` of an answer's prompt, whose first token has none; {} if the request did not ask."""
    if (scores := answers.prompt_logprobs.get(index)) is None:
        return {}
    return {"prompt_logprobs": [None, *(_ranked(one, rank) for one, rank in scores)]}


def _ranked(one: TokenLogprob, rank: int) -> dict[str, Any]:
    ranked = [*((other, place) for place, other in enumerate(one.top, 1)), (one, rank)]
    return {
        str(token.token_id): {"logprob": token.logprob, "rank": place, "decoded_token": token.text}
        for token, place in ranked
    }


def usage_json(usage: Usage) -> dict[str, Any]:
    """Usage in OpenAI's form, with tokens of a prediction and `Usage.own_json`, if any."""
    predicted = {}
    if usage.predicted is not None:
        right, wrong = usage.predicted
        predicted = {"accepted_prediction_tokens": right, "rejected_prediction_tokens": wrong}
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning, **predicted},
        **usage.own_json,
    }
