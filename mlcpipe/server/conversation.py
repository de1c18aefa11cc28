"""Shared by the chat APIs: from messages, tools and an answer format to answers of the engine."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mlcpipe.server.answers import Answers, Reading
from mlcpipe.server.bodies import EndingFields, ResponseFormat, SamplingFields, checked_stops
from mlcpipe.server.errors import ApiError
from mlcpipe.server.prompts import Ending, Prompt, listed, render
from mlcpipe.server.service import Service, repeated
from mlcpipe.server.tool_formats.style import Tool

MAX_TOOLS = 512
_NAME = re.compile(r"[^\s<>\"\\]{1,256}")  # valid in every style of calls
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


@dataclass(frozen=True)
class ToolChoice:
    """The callable tools, and whether one must be called."""

    tools: Sequence[Tool] = ()
    forced: bool = False
    parallel: bool = True


@dataclass(frozen=True)
class Conversation:
    """A conversation to answer; messages in the OpenAI API's form."""

    messages: Sequence[Mapping[str, Any]]
    choice: ToolChoice = ToolChoice()
    variables: Mapping[str, Any] = field(default_factory=dict)
    form: ResponseFormat | None = None
    max_tokens: int | None = None
    logprobs: int | None = None
    stops: Sequence[str] = ()
    n: int = 1
    prediction: str | None = None
    ending: Ending = "header"


def ending_of(body: EndingFields, messages: Sequence[Mapping[str, Any]]) -> Ending:
    """The end of the prompt. Raises ApiError for contradictory fields."""
    if not body.continue_final_message:
        return "nothing" if body.add_generation_prompt is False else "header"
    where, last = "continue_final_message", messages[-1] if messages else {}
    if body.add_generation_prompt:
        raise ApiError(400, f"{where}: not together with add_generation_prompt", param=where)
    if last.get("role") != "assistant" or last.get("content") is None:
        raise ApiError(400, f"{where}: expected a message of the assistant with content at the end", param=where)
    return "continued"


def tool_of(name: object, description: object, parameters: object, strict: object, where: str) -> Tool:
    """A checked tool. Raises ApiError."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ApiError(400, f"{where}.name: expected up to 256 characters, no space or tags", param=f"{where}.name")
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        raise ApiError(400, f"{where}.parameters: expected a JSON schema", param=f"{where}.parameters")
    return Tool(name, description if isinstance(description, str) else "", parameters, strict is True)


def choose(tools: Sequence[Tool], choice: str | None, *, named: str | None = None, parallel: bool = True) -> ToolChoice:
    """The tools that a choice allows: "none", "auto", "required", or a named one. Raises ApiError."""
    if len(tools) > MAX_TOOLS:
        raise ApiError(400, f"tools: expected at most {MAX_TOOLS}", param="tools")
    if named is not None:
        kept = [tool for tool in tools if tool.name == named]
        if not kept:
            raise ApiError(400, f"tool_choice: no tool is named {named[:100]!r}", param="tool_choice")
        return ToolChoice(kept[:1], forced=True, parallel=False)
    if choice not in (None, "none", "auto", "required"):
        raise ApiError(400, "tool_choice: expected none, auto, required or a tool", param="tool_choice")
    if choice == "required" and not tools:
        raise ApiError(400, "tool_choice: required, but there are no tools", param="tool_choice")
    return ToolChoice() if choice == "none" else ToolChoice(tools, choice == "required", parallel)


def choose_allowed(tools: Sequence[Tool], allowed: Any, *, parallel: bool) -> ToolChoice:
    """The tools that OpenAI's choice `allowed_tools` allows. Raises ApiError."""
    where = "tool_choice.tools"
    if not isinstance(allowed, Mapping):
        raise ApiError(400, "tool_choice.allowed_tools: expected a mode and tools", param="tool_choice")
    functions = [one.get("function", one) for one in listed(allowed.get("tools"), where) if isinstance(one, Mapping)]
    names = [one.get("name") for one in functions if isinstance(one, Mapping)]
    kept = [tool for tool in tools if tool.name in names]
    return choose(kept, str(allowed.get("mode", "auto")), parallel=parallel)


def thinking_variables(effort: str | None) -> dict[str, Any]:
    """Variables of chat templates for an effort of reasoning. Raises ApiError."""
    if effort is None:
        return {}
    if effort not in _EFFORTS:
        raise ApiError(400, f"reasoning_effort: expected one of {', '.join(_EFFORTS)}", param="reasoning_effort")
    return {"enable_thinking": False} if effort == "none" else {"reasoning_effort": effort}


async def prompt_of(service: Service, conversation: Conversation, nbytes: int) -> Prompt:
    """The tokens of a conversation, whose request's body has `nbytes`. Raises ApiError."""
    style, tools = service.style, conversation.choice.tools
    return await service.apart(
        lambda: render(
            service.tokenizer, conversation.messages, tools, style, conversation.variables, conversation.ending
        ),
        nbytes,
    )


async def answers_to(service: Service, body: SamplingFields, conversation: Conversation) -> Answers:
    """Begin to answer. Raises ApiError for fields that cannot be honoured, or too many requests."""
    service.check(body)
    choice, stops = conversation.choice, checked_stops(conversation.stops)
    prompt = await prompt_of(service, conversation, body.nbytes)
    request = service.request(body, prompt.tokens, conversation.max_tokens)
    request = replace(request, logprobs=conversation.logprobs)
    if conversation.prediction is not None:
        text = conversation.prediction[: service.tokenizer.most_chars]
        predicted = await service.apart(lambda: service.tokenizer.encode(text), body.nbytes)
        request = replace(request, prediction=predicted[: service.engine.context_length])
    form = await service.aside(lambda: service.source(body, conversation.form, prompt.thinking), body.nbytes)
    if choice.tools and (form is None or form.kind == "json_schema"):
        request = await service.with_tools(
            request, choice.tools, form, forced=choice.forced, parallel=choice.parallel, thinking=prompt.thinking,
            nbytes=body.nbytes,
        )  # fmt: skip
    elif choice.forced:
        raise ApiError(400, "regex and grammar: not together with a tool that must be called", param="tool_choice")
    else:
        request = await service.constrained(request, form)
    reading = Reading(stops, continues=conversation.ending == "continued", thinking=prompt.thinking)
    if choice.tools or service.style.channels:
        reading = replace(
            reading, style=service.style, tools=choice.tools, shown=service.shown, one_call=not choice.parallel
        )
    return service.start([(one, reading) for one in repeated(request, conversation.n)])
