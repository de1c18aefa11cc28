"""`/v1/responses`, as in OpenAI's API reference; nothing is stored, so a request brings its whole conversation."""

from __future__ import annotations

import itertools
import secrets
import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse
from pydantic import Field

from mlcpipe.runtime.tools import ToolChoice, choose, choose_allowed, tool_of
from mlcpipe.server.blocks import Blocks
from mlcpipe.server.bodies import Body, JsonSchemaFormat, ResponseFormat, SamplingFields, body_schema, parsed
from mlcpipe.server.conversation import (
    Conversation,
    answers_to,
    thinking_variables,
)
from mlcpipe.server.errors import ApiError
from mlcpipe.server.leases import text_service
from mlcpipe.server.response_events import ended, stream, usage_json
from mlcpipe.server.response_items import messages_of
from mlcpipe.server.service import Service
from mlcpipe.server.sse import EventStream, encoded, event, unless_left

router = APIRouter()
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


class ResponsesBody(SamplingFields):
    """The body of a request."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    include: list[str] | None = None
    # Refused by name: nothing is stored.
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    prompt: Any = None


@router.post("/v1/responses", openapi_extra=body_schema(ResponsesBody), response_model=None)
async def responses(
    request: Request, body: Annotated[ResponsesBody, Depends(parsed(ResponsesBody))]
) -> EventStream | JSONResponse:
    """Answer a conversation."""
    service = await text_service(request, body.model)
    service.check(body)
    frame, conversation = await service.aside(lambda: (_frame(body, service), _conversation(body)), body.nbytes)
    answers = await answers_to(service, body, conversation)
    if body.stream:
        numbers = itertools.count()
        return EventStream(stream(answers, frame, numbers), answers.close, lambda e: _failed(e, frame, next(numbers)))
    blocks = Blocks()
    await unless_left(request, blocks.whole(answers), answers.close)
    return JSONResponse({**ended(blocks, frame), "usage": usage_json(answers.usage)})


def _conversation(body: ResponsesBody) -> Conversation:
    for name in ("previous_response_id", "conversation", "prompt"):
        if getattr(body, name) is not None:
            message = f"{name}: this server stores nothing; send the whole conversation as input"
            raise ApiError(400, message, param=name, code="unsupported_parameter")
    if body.background:
        raise ApiError(400, "background: not supported", param="background", code="unsupported_parameter")
    messages = [{"role": "system", "content": body.instructions}] if body.instructions else []
    form = body.text.format if body.text is not None else None
    effort = body.reasoning.effort if body.reasoning is not None else None
    return Conversation(
        [*messages, *messages_of(body.input)],
        _tool_choice(body),
        {**thinking_variables(effort), **(body.chat_template_kwargs or {})},
        None if form is None else _form(form),
        body.max_output_tokens,
    )


def _form(form: TextFormat) -> ResponseFormat:
    schema = JsonSchemaFormat(name=form.name, schema=form.schema_, strict=form.strict)
    return ResponseFormat(type=form.type, json_schema=schema)


def _tool_choice(body: ResponsesBody) -> ToolChoice:
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
        "previous_response_id": None,
        "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
        "store": False,
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
