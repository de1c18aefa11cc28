"""Answers in Ollama's form: lines of JSON as they come, or one object."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import datetime, timezone
from typing import Any, NamedTuple

from fastapi import Request
from fastapi.responses import JSONResponse

from mlcpipe.runtime.sampling_params import TokenLogprob, ToolCall, add_pieces
from mlcpipe.server.answers import DeltaSource, Usage
from mlcpipe.server.errors import OLLAMA_PATHS
from mlcpipe.server.json_values import object_in
from mlcpipe.server.sse import EventStream, line, unless_left

Part = Callable[[str, str, Sequence[ToolCall]], dict[str, Any]]  # of text, thinking and calls


class Times(NamedTuple):
    """When a request came, on the clock `monotonic_ns`, and how long it waited for its model to be loaded."""

    began_ns: int
    load_ns: int


def moment(seconds: float | None = None) -> str:
    """A time since 1970, now for None, as RFC 3339 has it."""
    at = datetime.fromtimestamp(time.time() if seconds is None else seconds, timezone.utc)
    return at.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def message_part(text: str, thinking: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
    """A part of an answer to a chat."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thinking:
        message["thinking"] = thinking
    if calls:
        message["tool_calls"] = [_call(index, call) for index, call in enumerate(calls)]
    return {"message": message}


def text_part(text: str, thinking: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
    """A part of a text."""
    return {"response": text, **({"thinking": thinking} if thinking else {})}


async def reply(
    request: Request, answers: DeltaSource, model: str, part: Part, times: Times, *, stream: bool
) -> EventStream | JSONResponse:
    """The response with the first of the answers to a request."""
    if stream:
        failed = lambda error: line(error.body(OLLAMA_PATHS))  # noqa: E731
        return EventStream(_lines(answers, model, part, times), answers.close, failed, lines=True)
    (answer,) = await unless_left(request, answers.whole(), answers.close)
    return JSONResponse(
        {
            **_frame(model),
            **part(answer.text, answer.reasoning, answer.calls),
            **_end(answer.finish, answers.usage, times),
            **_logprobs(answer.logprobs),
        }
    )


async def _lines(answers: DeltaSource, model: str, part: Part, times: Times) -> AsyncIterator[str]:
    """A line for each part, calls whole before the last one."""
    calls: list[ToolCall] = []
    async for one in answers.deltas():
        add_pieces(calls, one.calls)
        if one.text or one.reasoning or one.logprobs:
            yield line({**_frame(model), **part(one.text, one.reasoning, ()), "done": False, **_logprobs(one.logprobs)})
        if one.finish is not None:
            if calls:
                yield line({**_frame(model), **part("", "", calls), "done": False})
            yield line({**_frame(model), **part("", "", ()), **_end(one.finish, answers.usage, times)})


def loaded(model: str, part: Part, reason: str) -> dict[str, Any]:
    """The response to a request without a prompt, which loads or unloads a model."""
    return {**_frame(model), **part("", "", ()), "done": True, "done_reason": reason}


def _frame(model: str) -> dict[str, Any]:
    return {"model": model, "created_at": moment()}


def _end(finish: str, usage: Usage, times: Times) -> dict[str, Any]:
    """Durations are in nanoseconds."""
    return {
        "done": True,
        "done_reason": "length" if finish == "length" else "stop",
        "total_duration": time.monotonic_ns() - times.began_ns,
        "load_duration": times.load_ns,
        "prompt_eval_count": usage.prompt,
        "prompt_eval_duration": round(usage.prompt_s * 1e9),
        "eval_count": usage.completion,
        "eval_duration": round(usage.answer_s * 1e9),
    }


def _call(index: int, call: ToolCall) -> dict[str, Any]:
    """A call, whose arguments are an object."""
    function = {"index": index, "name": call.name, "arguments": object_in(call.arguments)}
    return {"id": call.id, "function": function}


def _logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    if not tokens:
        return {}
    return {"logprobs": [{**_token(one), "top_logprobs": [_token(other) for other in one.top]} for one in tokens]}


def _token(one: TokenLogprob) -> dict[str, Any]:
    return {"token": one.text, "logprob": one.logprob, "bytes": list(one.bytes)}
