"""`/v1/responses`, as in OpenAI's API reference: answers, and those that are stored."""

from __future__ import annotations

import itertools
import json
import secrets
import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse
from pydantic import Field

from mlcpipe.runtime.tools import ToolChoice, choose, choose_allowed, tool_of
from mlcpipe.server.blocks import Blocks
from mlcpipe.server.bodies import (
    MAX_ITEMS,
    Body,
    Count,
    JsonSchemaFormat,
    ResponseFormat,
    SamplingFields,
    body_schema,
    key_of,
    parsed,
)
from mlcpipe.server.conversation import Conversation, answers_to, prompt_of
from mlcpipe.server.errors import ApiError
from mlcpipe.server.guard import MAX_BODY_BYTES
from mlcpipe.server.json_values import values_of
from mlcpipe.server.leases import text_service
from mlcpipe.server.response_events import ended, stream, usage_json
from mlcpipe.server.response_items import items_of, messages_of
from mlcpipe.server.response_store import ResponseStore
from mlcpipe.server.service import Service
from mlcpipe.server.sse import EventStream, encoded, event, unless_left
from mlcpipe.server.thinking import Thoughts, effort_variables

router = APIRouter()
_TOKEN_BYTES = 16  # of a token in JSON, about
MAX_ECHO = 4 << 20  # characters of a request that its events repeat


class TextFormat(Body):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str = ""
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Body):
    """`text` of a request."""

    format: TextFormat | None = None


class Reasoning(Body):
    """`reasoning` of a request."""

    effort: str | None = None


class InputBody(SamplingFields):
    """What a conversation has, of which the tokens can be counted."""

    input: str | list[dict[str, Any]] = []
    instructions: str | None = None
    max_output_tokens: Count | None = Field(None, ge=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    include: list[str] | None = None
    previous_response_id: str | None = None
    # Refused by name.
    conversation: Any = None
    background: bool | None = None
    prompt: Any = None


class ResponsesBody(InputBody):
    """The body of a request."""

    input: str | list[dict[str, Any]]


@router.post("/v1/responses", openapi_extra=body_schema(ResponsesBody), response_model=None)
async def responses(
    request: Request, body: Annotated[ResponsesBody, Depends(parsed(ResponsesBody))]
) -> EventStream | JSONResponse:
    """Answer a conversation."""
    service = await text_service(request, body.model)
    service.check(body)
    before, nbytes, referred = _history(request, body)

    def prepare() -> tuple[dict[str, Any], Conversation, list[dict[str, Any]], int, int]:
        items, frame = items_of(body.input), _frame(body, service)
        # Items that it refers to are kept with it, though their own response may be deleted.
        kept_bytes = 2 * body.nbytes + (len(json.dumps(items)) if referred else 0)
        return frame, _conversation(body, before), items, values_of([items, frame]), kept_bytes

    frame, conversation, items, values, kept_bytes = await service.aside(prepare, body.nbytes + nbytes)
    answers = await answers_to(service, body, conversation)

    def keep(response: dict[str, Any]) -> None:
        if response["store"]:
            # The response repeats a part of the body.
            json_bytes = kept_bytes + _TOKEN_BYTES * response["usage"]["output_tokens"]
            store_of(request).add(key_of(request), response, items, json_bytes, values)

    if body.stream:
        numbers = itertools.count()
        events = stream(answers, frame, numbers, keep)
        return EventStream(events, answers.close, lambda e: _failed(e, frame, next(numbers)))
    blocks = Blocks()
    await unless_left(request, blocks.whole(answers), answers.close)
    response = {**ended(blocks, frame), "usage": usage_json(answers.usage)}
    keep(response)
    return JSONResponse(response)


@router.post("/v1/responses/input_tokens", openapi_extra=body_schema(InputBody))
async def input_tokens(request: Request, body: Annotated[InputBody, Depends(parsed(InputBody))]) -> dict[str, Any]:
    """The tokens of a conversation."""
    service = await text_service(request, body.model)
    before, nbytes, _ = _history(request, body)
    conversation = await service.aside(lambda: _conversation(body, before), body.nbytes + nbytes)
    prompt = await prompt_of(service, conversation, body.nbytes + nbytes)
    return {"object": "response.input_tokens", "input_tokens": len(prompt.tokens)}


def store_of(request: Request) -> ResponseStore:
    """The server's stored responses."""
    store: ResponseStore = request.app.state.responses
    return store


def _history(request: Request, body: InputBody) -> tuple[list[dict[str, Any]], int, bool]:
    """The items before the input, their bytes with those of items that it refers to, which are put into it, and
    whether it refers to any.
    """
    where, store, owner = "previous_response_id", store_of(request), key_of(request)
    before, nbytes = store.history(owner, body.previous_response_id, MAX_ITEMS, where)
    more = 0
    if isinstance(body.input, list):
        body.input, more = store.resolved(owner, body.input, MAX_BODY_BYTES)
    return before, nbytes + more, more > 0


def _conversation(body: InputBody, before: list[dict[str, Any]]) -> Conversation:
    for name in ("conversation", "prompt"):
        if getattr(body, name) is not None:
            message = f"{name}: not offered here; send previous_response_id, or the whole conversation as input"
            raise ApiError(400, message, param=name, code="unsupported_parameter")
    if body.background:
        raise ApiError(400, "background: not supported", param="background", code="unsupported_parameter")
    messages = [{"role": "system", "content": body.instructions}] if body.instructions else []
    given = items_of(body.input) if isinstance(body.input, str) else body.input
    form = body.text.format if body.text is not None else None
    effort = body.reasoning.effort if body.reasoning is not None else None
    return Conversation(
        [*messages, *messages_of([*before, *given])],
        _tool_choice(body),
        {**effort_variables(effort), **(body.chat_template_kwargs or {})},
        None if form is None else _form(form),
        body.max_output_tokens,
        thoughts=Thoughts(effort=effort),
    )


def _form(form: TextFormat) -> ResponseFormat:
    schema = JsonSchemaFormat(name=form.name, schema=form.schema_, strict=form.strict)
    return ResponseFormat(type=form.type, json_schema=schema)


def _tool_choice(body: InputBody) -> ToolChoice:
    """The function tools; skips tools that OpenAI runs itself, and those of other kinds."""
    tools = []
    for index, tool in enumerate(body.tools or ()):
        if tool.get("type") == "function":
            get = tool.get
            where = f"tools[{index}]"
            tools.append(tool_of(get("name"), get("description"), get("parameters"), get("strict"), where))
    parallel = body.parallel_tool_calls is not False
    if not isinstance(body.tool_choice, dict):
        return choose(tools, body.tool_choice, parallel=parallel)
    if body.tool_choice.get("type") == "allowed_tools":
        return choose_allowed(tools, body.tool_choice, parallel=parallel)
    return choose(tools, None, named=str(body.tool_choice.get("name")), parallel=parallel)


def _frame(body: ResponsesBody, service: Service) -> dict[str, Any]:
    """The fields of a response that do not depend on the answer. Raises ApiError for fields that cannot be repeated."""
    form = body.text.format if body.text is not None and body.text.format is not None else TextFormat(schema=None)
    sampling = service.sampling(body)
    frame = {
        "id": f"resp_{secrets.token_hex(16)}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": service.name_of(body.model),
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
        "store": body.store is not False,
        "temperature": sampling.temperature,
        "text": {"format": form.model_dump(by_alias=True, exclude_none=True, include={"type", "name", "schema_"})
                 if form.type == "json_schema" else {"type": form.type}},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }  # fmt: skip
    try:
        length = len(encoded(frame))
    except ValueError:
        raise ApiError(400, "metadata, tools, tool_choice: expected finite numbers", code="invalid_body") from None
    if length > MAX_ECHO:
        message = f"instructions, metadata, tools: expected at most {MAX_ECHO} characters, which each answer repeats"
        raise ApiError(400, message, code="invalid_body")
    return frame


def _failed(error: ApiError, frame: dict[str, Any], number: int) -> str:
    told = {"code": "server_error", "message": error.message}
    response = {**frame, "status": "failed", "error": told}
    return event({"type": "response.failed", "sequence_number": number, "response": response}, "response.failed")
