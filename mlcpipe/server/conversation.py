"""Shared by the chat APIs: from messages, tools and an answer format to answers of the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from mlcpipe.runtime.answer_reader import Reading
from mlcpipe.runtime.text.thinking import EFFORT
from mlcpipe.runtime.tools import ToolChoice
from mlcpipe.server.answers import Answers, check_scores
from mlcpipe.server.bodies import EndingFields, ResponseFormat, SamplingFields, checked_stops
from mlcpipe.server.errors import ApiError
from mlcpipe.server.lora_scales import with_scales
from mlcpipe.server.message_content import pictures_in
from mlcpipe.server.off_loop import LONG_BYTES
from mlcpipe.server.prompts import Ending, Prompt, render
from mlcpipe.server.service import Service, repeated
from mlcpipe.server.thinking import Thoughts


@dataclass(frozen=True)
class Conversation:
    """A conversation to answer; messages in the OpenAI API's form.

    `most_tokens` is a bound for prompt and answer together, below the model's context.
    """

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
    most_tokens: int | None = None
    thoughts: Thoughts = Thoughts()
    prompt_logprobs: int | None = None


def ending_of(body: EndingFields, messages: Sequence[Mapping[str, Any]]) -> Ending:
    """The end of the prompt. Raises ApiError for contradictory fields."""
    where, last = "continue_final_message", messages[-1] if messages else {}
    # In the message Mistral and DeepSeek, Qwen and Kimi say it.
    begun = last.get("role") == "assistant" and True in (last.get("prefix"), last.get("partial"))
    if not (body.continue_final_message or begun):
        return "nothing" if body.add_generation_prompt is False else "header"
    if body.add_generation_prompt:
        raise ApiError(400, f"{where}: not together with add_generation_prompt", param=where)
    if last.get("role") != "assistant" or last.get("content") is None:
        raise ApiError(400, f"{where}: expected a message of the assistant with content at the end", param=where)
    return "continued"


def begun_ending(service: Service, messages: Sequence[Mapping[str, Any]]) -> Ending:
    """The end of the prompt where a last message of the assistant is the begin of the answer, as far as a model of one
    channel can continue it.
    """
    last = messages[-1] if messages else {}
    begun = last.get("role") == "assistant" and last.get("content")
    return "continued" if begun and not service.calling.style.channels else "header"


async def prompt_of(service: Service, conversation: Conversation, nbytes: int) -> Prompt:
    """The tokens of a conversation, whose request's body has `nbytes`. Raises ApiError."""
    style, tools, sees = service.calling.style, conversation.choice.tools, service.facts.vision is not None
    if sees and any(pictures_in(conversation.messages)):
        nbytes = max(nbytes, LONG_BYTES + 1)  # few bytes may be many pixels
    async with AsyncExitStack() as stack:
        messages = conversation.messages
        if sees and service.remote_pictures is not None:
            messages = await stack.enter_async_context(service.remote_pictures.fetched(messages))
        return await service.apart(
            lambda: render(
                service.tokenizer,
                messages,
                tools,
                style,
                conversation.variables,
                conversation.ending,
                service.facts.vision,
                service.engine.context_length,
            ),
            nbytes,
        )


def within(most_tokens: int | None, prompt_tokens: int, max_tokens: int | None) -> int | None:
    """The most tokens of an answer, where prompt and answer have `most_tokens` together. Raises ApiError."""
    if most_tokens is None:
        return max_tokens
    if prompt_tokens >= most_tokens:
        message = f"the prompt has {prompt_tokens} tokens; expected less than the {most_tokens} of the asked context"
        raise ApiError(400, message, code="context_length_exceeded")
    return min(most_tokens if max_tokens in (None, -1) else max_tokens or 0, most_tokens - prompt_tokens)


async def answers_to(service: Service, body: SamplingFields, conversation: Conversation) -> Answers:
    """Begin to answer. Raises ApiError for fields that cannot be honoured, or too many requests."""
    service.check(body)
    choice, stops = conversation.choice, checked_stops(conversation.stops)
    prompt = await prompt_of(service, conversation, body.nbytes)
    most = within(conversation.most_tokens, len(prompt.tokens), conversation.max_tokens)
    check_scores(len(prompt.tokens), conversation.prompt_logprobs, 1, "prompt_logprobs")  # reported once for all n
    request = service.request(body, prompt.tokens, most)
    rules = await service.rules(body, _budget(service, conversation), prompt.thinking)
    request = replace(
        request,
        logprobs=conversation.logprobs,
        prompt_logprobs=conversation.prompt_logprobs,
        pictures=prompt.pictures,
    )
    request = await service.with_rules(request, rules)
    if conversation.prediction is not None:
        text = conversation.prediction[: service.tokenizer.most_chars]
        predicted = await service.apart(lambda: service.tokenizer.encode(text), body.nbytes)
        request = replace(request, prediction=predicted[: service.engine.context_length])
    form = await service.aside(lambda: service.source(body, conversation.form, prompt.thinking), body.nbytes)
    if choice.tools and (form is None or form.kind == "json_schema"):
        request = await service.with_tools(request, choice, form, prompt.thinking, body.nbytes)
    elif choice.forced:
        raise ApiError(400, "regex and grammar: not together with a tool that must be called", param="tool_choice")
    else:
        request = await service.constrained(request, form)
    request = await with_scales(service, body, request)
    given = conversation.thoughts.given
    reading = Reading(
        stops,
        continues=conversation.ending == "continued",
        thinking="none" if given == "inline" else prompt.thinking,
        silent=conversation.max_tokens == 0,
        thoughts=given != "no",
    )
    calling = service.calling
    if choice.tools or calling.style.channels:
        reading = replace(
            reading, style=calling.style, tools=choice.tools, shown=calling.shown, one_call=not choice.parallel
        )
    return service.start([(one, reading) for one in repeated(request, conversation.n)])


def _budget(service: Service, conversation: Conversation) -> int | None:
    """Most tokens of thoughts, None for any number."""
    thoughts, tokenizer = conversation.thoughts, service.tokenizer
    if thoughts.effort is None:
        return thoughts.budget
    name = tokenizer.template_name([tool.described() for tool in conversation.choice.tools] or None)
    return thoughts.budget_with(takes_effort=EFFORT in tokenizer.chat_template(name).variables)
