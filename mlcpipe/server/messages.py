"""`/v1/messages` and `/v1/messages/count_tokens`, as in Anthropic's API reference."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse
from pydantic import Field

from mlcpipe.runtime.tools import ToolChoice, choose, tool_of
from mlcpipe.server.answers import Answers, Usage
from mlcpipe.server.blocks import Block, BlockEvent, Blocks
from mlcpipe.server.bodies import Count, JsonSchemaFormat, ResponseFormat, SamplingFields, body_schema, parsed
from mlcpipe.server.conversation import Conversation, answers_to, begun_ending, prompt_of
from mlcpipe.server.errors import ANTHROPIC_PATH, ApiError
from mlcpipe.server.json_values import object_in
from mlcpipe.server.leases import text_service
from mlcpipe.server.message_blocks import messages_of
from mlcpipe.server.message_content import PlacedMessage, text_of
from mlcpipe.server.prompts import without_billing
from mlcpipe.server.service import Service
from mlcpipe.server.sse import EventStream, event, unless_left
from mlcpipe.server.thinking import Thoughts, effort_variables, thinking_of

router = APIRouter()
_PING = event({"type": "ping"}, "ping")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class CountBody(SamplingFields):
    """The body of `count_tokens`, which may be that of the request itself."""

    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    # No count depends on them.
    max_tokens: Count | None = Field(None, ge=0)
    stop_sequences: list[str] | None = None
    output_format: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None


class MessagesBody(CountBody):
    """The body of a request."""

    max_tokens: Count = Field(ge=0)  # 0: only the prompt is computed
    metadata: dict[str, Any] | None = None


@router.post(ANTHROPIC_PATH, openapi_extra=body_schema(MessagesBody), response_model=None)
async def messages(
    request: Request, body: Annotated[MessagesBody, Depends(parsed(MessagesBody))]
) -> EventStream | JSONResponse:
    """Answer a conversation."""
    service = await text_service(request, body.model)
    answers = await answers_to(service, body, await service.aside(lambda: _conversation(service, body), body.nbytes))
    frame = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant",
             "model": service.name_of(body.model)}  # fmt: skip
    if body.stream:
        return EventStream(_events(answers, frame), answers.close, _failed, _PING)
    blocks = Blocks()
    await unless_left(request, blocks.whole(answers), answers.close)
    content = [_content(block) for block in blocks.made]
    return JSONResponse({**frame, "content": content, **_end(blocks), "usage": _usage(answers.usage)})


@router.post(f"{ANTHROPIC_PATH}/count_tokens", openapi_extra=body_schema(CountBody))
async def count_tokens(request: Request, body: Annotated[CountBody, Depends(parsed(CountBody))]) -> dict[str, int]:
    """The tokens of a conversation."""
    service = await text_service(request, body.model)
    service.check_model(body.model)
    conversation = await service.aside(lambda: _conversation(service, body), body.nbytes)
    return {"input_tokens": len((await prompt_of(service, conversation, body.nbytes)).tokens)}


def _conversation(service: Service, body: CountBody) -> Conversation:
    system = body.system if isinstance(body.system, list) else [{"type": "text", "text": body.system or ""}]
    texts = without_billing([text_of([part], "system") for part in system])
    out: list[dict[str, Any]] = [{"role": "system", "content": "\n\n".join(texts)}] if any(texts) else []
    for index, message in enumerate(body.messages):
        where = f"messages[{index}]"
        out += [PlacedMessage(one, where) for one in messages_of(message, where)]
    begun = out[-1] if out and out[-1]["role"] == "assistant" else {}
    if begun.get("tool_calls"):
        raise ApiError(400, "messages: expected the results of the tools after their calls", param="messages")
    ending = begun_ending(service, out)
    # As with Anthropic, reasoning must be requested.
    thinks, budget = thinking_of(body.thinking) if body.thinking else (False, None)
    effort = (body.output_config or {}).get("effort")
    variables = {"enable_thinking": bool(thinks), **effort_variables(effort, "output_config.effort")}
    thoughts = Thoughts(budget=budget, effort=effort)
    conversation = Conversation(out, _tool_choice(body), variables, ending=ending, thoughts=thoughts)
    if not isinstance(body, MessagesBody):
        return conversation
    form = (body.output_config or {}).get("format") or body.output_format
    return replace(
        conversation,
        form=None if form is None else _form(form),
        max_tokens=body.max_tokens,
        stops=body.stop_sequences or (),
    )


def _form(form: Any) -> ResponseFormat:
    schema = form.get("schema") if isinstance(form, Mapping) else None
    if not isinstance(schema, dict) or form.get("type") != "json_schema":
        raise ApiError(400, "output_config.format: expected a json_schema with a schema")
    return ResponseFormat(type="json_schema", json_schema=JsonSchemaFormat(schema=schema))


def _tool_choice(body: CountBody) -> ToolChoice:
    """Tools with a schema; skips those that Anthropic runs itself."""
    tools = [
        tool_of(tool.get("name"), tool.get("description"), tool.get("input_schema"), tool.get("strict"), f"tools[{i}]")
        for i, tool in enumerate(body.tools or ())
        if tool.get("type", "custom") == "custom"
    ]
    given = body.tool_choice or {"type": "auto"}
    parallel = given.get("disable_parallel_tool_use") is not True
    if given.get("type") == "tool":
        return choose(tools, {"name": given.get("name")})
    return choose(tools, _CHOICES.get(str(given.get("type")), "unknown"), parallel=parallel)


async def _events(answers: Answers, frame: dict[str, Any]) -> AsyncIterator[str]:
    """The events of a stream."""
    begun = {**frame, "content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(answers.usage)}
    yield event({"type": "message_start", "message": begun}, "message_start")
    yield _PING
    blocks = Blocks()
    async for one in blocks.events(answers):
        if one.what == "stop" and one.block.kind == "reasoning":
            signed = {"type": "signature_delta", "signature": ""}
            yield event(
                {"type": "content_block_delta", "index": one.block.index, "delta": signed}, "content_block_delta"
            )
        yield _block_event(one)
    end = {"type": "message_delta", "delta": _end(blocks), "usage": _usage(answers.usage)}
    yield event(end, "message_delta")
    yield event({"type": "message_stop"}, "message_stop")


def _block_event(one: BlockEvent) -> str:
    index, kind = one.block.index, one.block.kind
    if one.what == "start":
        empty = Block(index, kind, one.block.id, one.block.name)
        made = {"type": "content_block_start", "index": index, "content_block": _content(empty)}
    elif one.what == "stop":
        made = {"type": "content_block_stop", "index": index}
    else:
        name, key = {"text": ("text_delta", "text"), "reasoning": ("thinking_delta", "thinking"),
                     "call": ("input_json_delta", "partial_json")}[kind]  # fmt: skip
        made = {"type": "content_block_delta", "index": index, "delta": {"type": name, key: one.text}}
    return event(made, str(made["type"]))


def _content(block: Block) -> dict[str, Any]:
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    return {"type": "tool_use", "id": block.id, "name": block.name, "input": object_in(block.text)}


def _end(blocks: Blocks) -> dict[str, Any]:
    last = blocks.last
    assert last is not None
    reason = {"length": "max_tokens", "tool_calls": "tool_use"}.get(last.finish or "", "end_turn")
    if last.stop_string is not None and reason == "end_turn":
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": last.stop_string if reason == "stop_sequence" else None}


def _usage(usage: Usage) -> dict[str, Any]:
    """Usage in Anthropic's form: tokens from the cache are not input."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "output_tokens": usage.completion,
        "cache_read_input_tokens": usage.cached,
        "cache_creation_input_tokens": 0,
        **usage.own_json,
    }


def _failed(error: ApiError) -> str:
    return event(error.body(ANTHROPIC_PATH), "error")
