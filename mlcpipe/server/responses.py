"""`/v1/responses`, as in OpenAI's API reference: answers, and those that are stored."""

from __future__ import annotations

import itertools
import json
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse
from pydantic import Field

from mlcpipe.runtime.sampling_params import MAX_LOGPROBS
from mlcpipe.runtime.tools import ToolChoice, choose, choose_allowed, custom_of, tool_of
from mlcpipe.server import compaction
from mlcpipe.server.background import Run, Runs
from mlcpipe.server.blocks import Blocks
from mlcpipe.server.bodies import (
    MAX_ITEMS,
    Body,
    Count,
    JsonSchemaFormat,
    ResponseFormat,
    SamplingFields,
    TimedFields,
    body_schema,
    key_of,
    parsed,
)
from mlcpipe.server.conversation import Conversation, answers_to, prompt_of
from mlcpipe.server.conversation_store import items_bytes, kept_items
from mlcpipe.server.errors import ApiError
from mlcpipe.server.guard import MAX_BODY_BYTES
from mlcpipe.server.json_values import values_of
from mlcpipe.server.leases import text_service
from mlcpipe.server.owned_store import Items
from mlcpipe.server.response_events import ended, stream, usage_json
from mlcpipe.server.response_items import items_of, messages_of
from mlcpipe.server.response_store import ResponseStore, refers
from mlcpipe.server.service import Service
from mlcpipe.server.sse import EventStream, encoded, event, unless_left
from mlcpipe.server.stored_conversations import conversations_of
from mlcpipe.server.thinking import Reasoning, ThinkingFields, Thoughts, effort_variables

router = APIRouter()
_TOKEN_BYTES = 16  # of a token in JSON, about
_LOGPROBS = 16  # times that, of one with its log-probability, and of each alternative
_LOGPROBS_NAME = "message.output_text.logprobs"  # in `include`
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
    conversation: Any = None
    top_logprobs: Count | None = Field(None, ge=0, le=MAX_LOGPROBS)
    prompt: Any = None  # refused by name


class ResponsesBody(InputBody, TimedFields):
    """The body of a request."""

    input: str | list[dict[str, Any]]
    background: bool | None = None


@router.post("/v1/responses", openapi_extra=body_schema(ResponsesBody), response_model=None)
async def responses(
    request: Request, body: Annotated[ResponsesBody, Depends(parsed(ResponsesBody))]
) -> EventStream | JSONResponse:
    """Answer a conversation."""
    service, owner = await text_service(request, body.model), key_of(request)
    service.check(body)
    if body.background:
        if body.store is False:
            raise ApiError(400, "background: expected to be stored; leave store out", param="background")
        _check_length(body, service)
        runs_of(request).check(owner, request.app.state.rules.per_key, body.nbytes)
    store, conversations, runs = store_of(request), conversations_of(request), runs_of(request)
    earlier = await history_of(request, body)

    def prepare() -> tuple[dict[str, Any], Conversation, Kept]:
        items, frame = items_of(body.input), _frame(body, service)
        # Items that it refers to are kept with it, though their own response may be deleted.
        kept_bytes = 2 * body.nbytes + (len(json.dumps(items)) if earlier.referred else 0)
        more = [] if earlier.conversation is None else kept_items(items)
        kept = Kept(items, kept_bytes, values_of([items, frame]), more, items_bytes(more))
        return frame, conversation_of(body, earlier.items), kept

    frame, conversation, kept = await service.aside(prepare, body.nbytes + earlier.nbytes)
    if earlier.conversation is not None:
        room = kept.more_bytes + _TOKEN_BYTES * service.engine.context_length
        conversations.check_room(owner, earlier.conversation, len(kept.more) + 1, room, "conversation")
    answers = await answers_to(service, body, conversation)

    async def keep(response: dict[str, Any]) -> None:
        if response["store"]:
            # The response repeats a part of the body.
            told = 1 if conversation.logprobs is None else _LOGPROBS * (1 + conversation.logprobs)
            nbytes = kept.json_bytes + _TOKEN_BYTES * answers.usage.completion * told
            response["store"] = False  # unless it is
            with suppress(ApiError):  # the store logs it
                stored = {**response, "store": True}
                adding = store.ask(lambda each: each.add(owner, stored, kept.items, nbytes, kept.values))
                response["store"] = await adding
        if earlier.conversation is not None and response["status"] in ("completed", "incomplete"):
            said = kept_items(response["output"])
            nbytes = kept.more_bytes + items_bytes(said)
            with suppress(ApiError):  # the conversation was deleted
                conversations.append(owner, earlier.conversation, [*kept.more, *said], nbytes)

    numbers = itertools.count()
    if body.background:
        nbytes = body.nbytes + earlier.nbytes
        try:
            runs.check(owner, request.app.state.rules.per_key, nbytes)  # others may have begun meanwhile
        except ApiError:
            answers.close()
            raise
        run = Run(owner, frame, nbytes, streams=bool(body.stream))

        async def finished(response: dict[str, Any]) -> None:
            run.response = response
            await keep(response)

        async def broken(error: ApiError, status: str) -> str:
            await finished(failed_response(error, frame, status))
            return _failed(run.response, next(numbers))

        events = stream(answers, frame, numbers, finished, timed=bool(body.timings_per_token))
        run.start(answers, events, broken, request.state.leases.pop_all())
        runs.add(run)
        if not body.stream:
            return JSONResponse(run.response)
        return EventStream(run.follow(), lambda: None, lambda e: event(e.body("")))
    if body.stream:
        events = stream(answers, frame, numbers, keep, timed=bool(body.timings_per_token))
        return EventStream(events, answers.close, lambda e: _failed(failed_response(e, frame, "failed"), next(numbers)))
    blocks = Blocks()
    await unless_left(request, blocks.whole(answers), answers.close)
    response = {**ended(blocks, frame), "usage": usage_json(answers.usage)}
    await keep(response)
    return JSONResponse(response)


@router.post("/v1/responses/input_tokens", openapi_extra=body_schema(InputBody))
async def input_tokens(request: Request, body: Annotated[InputBody, Depends(parsed(InputBody))]) -> dict[str, Any]:
    """The tokens of a conversation."""
    service = await text_service(request, body.model)
    earlier = await history_of(request, body)
    nbytes = body.nbytes + earlier.nbytes
    conversation = await service.aside(lambda: conversation_of(body, earlier.items), nbytes)
    prompt = await prompt_of(service, conversation, nbytes)
    return {"object": "response.input_tokens", "input_tokens": len(prompt.tokens)}


@router.post("/v1/responses/compact", openapi_extra=body_schema(InputBody))
async def compact(request: Request, body: Annotated[InputBody, Depends(parsed(InputBody))]) -> dict[str, Any]:
    """A conversation as its last messages of the user, and a summary of all of it that the model writes."""
    service = await text_service(request, body.model)
    service.check(body)
    earlier, length = await history_of(request, body), service.engine.context_length
    most = min(body.max_output_tokens or compaction.MAX_SUMMARY, length // 4)

    def prepare() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        items = [*earlier.items, *items_of(body.input)]
        messages = conversation_of(body, earlier.items).messages
        room = length - most - length // 4  # a quarter is for the task and the template
        values_of(items)  # which may be given back
        return compaction.kept_messages(items, length), compaction.asked(service.tokenizer, messages, room)

    kept, messages = await service.apart(prepare, body.nbytes + earlier.nbytes)
    asked = Conversation(messages, variables=effort_variables("none"), max_tokens=most, thoughts=Thoughts(given="no"))
    answers = await answers_to(service, body, asked)
    (answer,) = await unless_left(request, answers.whole(), answers.close)
    sealed = compaction.sealed(answer.text.strip())
    item = {"id": f"cmp_{secrets.token_hex(16)}", "type": "compaction", "encrypted_content": sealed}
    return {
        "id": f"resp_{secrets.token_hex(16)}", "object": "response.compaction", "created_at": int(time.time()),
        "output": [*kept_items(kept), item], "usage": usage_json(answers.usage),
    }  # fmt: skip


@dataclass(frozen=True)
class Kept:
    """What is stored of a request: its input items, their bytes as JSON and values, and those of its conversation."""

    items: list[dict[str, Any]]
    json_bytes: int
    values: int
    more: list[dict[str, Any]]
    more_bytes: int


@dataclass(frozen=True)
class Earlier:
    """What comes before the input: items, with the bytes of those that it refers to, and the conversation's name."""

    items: Sequence[dict[str, Any]]
    nbytes: int
    referred: bool
    conversation: str | None


def store_of(request: Request) -> ResponseStore:
    """The server's stored responses."""
    store: ResponseStore = request.app.state.responses
    return store


def runs_of(request: Request) -> Runs:
    """The server's responses in the background."""
    runs: Runs = request.app.state.runs
    return runs


async def history_of(request: Request, body: InputBody) -> Earlier:
    """What comes before the input, in which items take the places of references to them. Raises ApiError."""
    where, owner = "previous_response_id", key_of(request)
    name = _conversation_name(body)
    if name is not None and body.previous_response_id is not None:
        raise ApiError(400, "conversation: not together with previous_response_id", param="conversation")
    previous = body.previous_response_id
    if previous is not None and (run := runs_of(request).find(owner, previous)) is not None and not run.ended:
        raise ApiError(400, f"{where}: the response {previous[:100]!r} has not ended; get it until it has", param=where)
    given = body.input if isinstance(body.input, list) else []

    def read(store: ResponseStore) -> tuple[tuple[Items, int], tuple[Items, int]]:
        return store.history(owner, previous, MAX_ITEMS, where), store.resolved(owner, given, MAX_BODY_BYTES)

    before, nbytes, resolved, more = list[dict[str, Any]](), 0, given, 0
    if previous is not None or any(map(refers, given)):
        (before, nbytes), (resolved, more) = await store_of(request).ask(read)
    if name is not None:
        found = conversations_of(request).get(owner, name, "conversation")
        before, nbytes = list(found.items), found.nbytes
    if isinstance(body.input, list):
        body.input = resolved
    return Earlier(before, nbytes + more, more > 0, name)


def _check_length(body: ResponsesBody, service: Service) -> None:
    """Raises ApiError for an answer without end in the background, where nobody who leaves ends it."""
    most = service.engine.context_length  # which bounds it where contexts are not shifted
    if service.engine.context_shift and (body.max_output_tokens or 0) > most:
        message = f"max_output_tokens: expected at most {most} in the background, found {body.max_output_tokens}"
        raise ApiError(400, message, param="max_output_tokens")


def _conversation_name(body: InputBody) -> str | None:
    given = body.conversation
    name = given.get("id") if isinstance(given, dict) else given
    if name is not None and not isinstance(name, str) or (name is None and given is not None):
        raise ApiError(400, "conversation: expected its id, or an object with it", param="conversation")
    return name


def conversation_of(body: InputBody, before: Sequence[dict[str, Any]]) -> Conversation:
    """The conversation of a body after earlier items. Raises ApiError."""
    if body.prompt is not None:
        message = "prompt: not offered here; send instructions and input"
        raise ApiError(400, message, param="prompt", code="unsupported_parameter")
    messages = [{"role": "system", "content": body.instructions}] if body.instructions else []
    given = items_of(body.input) if isinstance(body.input, str) else body.input
    form = body.text.format if body.text is not None else None
    thoughts = ThinkingFields.model_validate({"reasoning": body.reasoning}).thoughts()
    told = body.top_logprobs is not None or _LOGPROBS_NAME in (body.include or ())
    return Conversation(
        [*messages, *messages_of([*before, *given], len(before))],
        _tool_choice(body),
        {**thoughts.variables, **(body.chat_template_kwargs or {})},
        None if form is None else _form(form),
        body.max_output_tokens,
        (body.top_logprobs or 0) if told else None,
        thoughts=thoughts,
    )


def _form(form: TextFormat) -> ResponseFormat:
    schema = JsonSchemaFormat(name=form.name, schema=form.schema_, strict=form.strict)
    return ResponseFormat(type=form.type, json_schema=schema)


def _tool_choice(body: InputBody) -> ToolChoice:
    """The functions and custom tools; skips tools that OpenAI runs itself, and those of other kinds."""
    tools = []
    for index, tool in enumerate(body.tools or ()):
        get, where = tool.get, f"tools[{index}]"
        if get("type") == "custom":
            tools.append(custom_of(tool, where))
        elif get("type") == "function":
            tools.append(tool_of(get("name"), get("description"), get("parameters"), get("strict"), where))
    parallel = body.parallel_tool_calls is not False
    if isinstance(body.tool_choice, dict) and body.tool_choice.get("type") == "allowed_tools":
        return choose_allowed(tools, body.tool_choice, parallel=parallel)
    return choose(tools, body.tool_choice, parallel=parallel)


def _frame(body: ResponsesBody, service: Service) -> dict[str, Any]:
    """The fields of a response that do not depend on the answer. Raises ApiError for fields that cannot be repeated."""
    form = body.text.format if body.text is not None and body.text.format is not None else TextFormat(schema=None)
    sampling = service.sampling(body)
    frame = {
        "id": f"resp_{secrets.token_hex(16)}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": bool(body.background),
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": service.name_of(body.model),
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "conversation": None if (name := _conversation_name(body)) is None else {"id": name},
        "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
        "store": body.store is not False,
        "temperature": sampling.temperature,
        "text": {"format": form.model_dump(by_alias=True, exclude_none=True, include={"type", "name", "schema_"})
                 if form.type == "json_schema" else {"type": form.type}},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
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


def failed_response(error: ApiError, frame: dict[str, Any], status: str) -> dict[str, Any]:
    """The response that ended with an error, or was cancelled."""
    told = {"code": "server_error", "message": error.message}
    return {**frame, "status": status, "error": told if status == "failed" else None}


def _failed(response: dict[str, Any], number: int) -> str:
    kind = f"response.{response['status']}"
    return event({"type": kind, "sequence_number": number, "response": response}, kind)
