"""The output of `/v1/responses`: items, and the events of a stream."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from functools import cache
from typing import Any

from mlcpipe.runtime.sampling_params import TokenLogprob
from mlcpipe.server.answers import Answers, Usage
from mlcpipe.server.blocks import Block, BlockEvent, Blocks
from mlcpipe.server.sse import encoded, event
from mlcpipe.server.timings import PromptProgress, timings

_PREFIX = {"reasoning": "rs", "text": "msg", "call": "fc", "custom": "ctc"}
_TIMED = ("response.output_text.delta", "response.completed", "response.incomplete")
Emit = Callable[..., str]


def ended(blocks: Blocks, frame: dict[str, Any], ids: dict[int, str] | None = None) -> dict[str, Any]:
    """The response at the end of the answer, without its usage."""
    ids = {block.index: _new_id(block) for block in blocks.made} if ids is None else ids
    cut = blocks.last is not None and blocks.last.finish == "length"
    return {
        **frame,
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": [_item(block, ids[block.index]) for block in blocks.made],
    }


async def stream(
    answers: Answers,
    frame: dict[str, Any],
    numbers: Iterator[int],
    keep: Callable[[dict[str, Any]], Awaitable[None]],
    *,
    timed: bool = False,
) -> AsyncIterator[str]:
    """The events of an answer, numbered by `numbers`; its whole response goes to `keep`. Raises ApiError.

    Progress of the prompt and, if `timed`, times so far are in them as llama-server has them.
    """

    def emit(kind: str, **fields: Any) -> str:
        more = {"timings": timings(answers.usage)} if timed and kind in _TIMED else {}
        return event({"type": kind, "sequence_number": next(numbers), **fields, **more}, kind)

    @cache
    def repeated() -> str:
        return encoded(frame)

    def again(**fields: Any) -> str:
        """`response.in_progress` with a frame that may be long, and is encoded once for all of them."""
        kind = "response.in_progress"
        head = encoded({"type": kind, "sequence_number": next(numbers), **fields})[:-1]
        return f'event: {kind}\ndata: {head},"response":{repeated()}}}\n\n'

    yield emit("response.created", response=frame)
    yield emit("response.in_progress", response=frame)
    blocks, ids = Blocks(), dict[int, str]()
    progress = {index: PromptProgress(size) for index, size in answers.prompt_sizes.items()}
    async for delta in answers.deltas():
        told = progress[delta.index].told(delta, timed=timed) if delta.index in progress else None
        if told is not None:
            yield again(**told)
        for one in blocks.taken(delta):
            for text in _block_events(one, ids, emit):
                yield text
    for one in blocks.closed():
        for text in _block_events(one, ids, emit):
            yield text
    response = {**ended(blocks, frame, ids), "usage": usage_json(answers.usage)}
    await keep(response)
    yield emit(f"response.{response['status']}", response=response)


def _block_events(one: BlockEvent, ids: dict[int, str], emit: Emit) -> Iterator[str]:
    block = one.block
    item_id = ids.setdefault(block.index, _new_id(block))
    place = {"item_id": item_id, "output_index": block.index}
    part_place = {**place, "content_index": 0}
    if one.what == "start":
        empty = {**_item(Block(block.index, block.kind, block.id, block.name), item_id), "status": "in_progress"}
        if block.kind not in ("call", "custom"):
            empty["content"] = []
        yield emit("response.output_item.added", output_index=block.index, item=empty)
        if block.kind == "text":
            yield emit("response.content_part.added", **part_place, part=_part(Block(0, "text")))
    elif one.what == "delta":
        if block.kind == "call":
            yield emit("response.function_call_arguments.delta", **place, delta=one.text)
        elif block.kind == "custom":
            yield emit("response.custom_tool_call_input.delta", **place, delta=one.text)
        elif block.kind == "text":
            yield emit("response.output_text.delta", **part_place, delta=one.text, logprobs=_logprobs(one.logprobs))
        else:
            yield emit("response.reasoning_text.delta", **part_place, delta=one.text)
    else:
        if block.kind == "call":
            done = {**place, "name": block.name, "arguments": block.text}
            yield emit("response.function_call_arguments.done", **done)
        elif block.kind == "custom":
            yield emit("response.custom_tool_call_input.done", **place, input=block.text)
        elif block.kind == "text":
            yield emit("response.output_text.done", **part_place, text=block.text, logprobs=_logprobs(block.logprobs))
            yield emit("response.content_part.done", **part_place, part=_part(block))
        else:
            yield emit("response.reasoning_text.done", **part_place, text=block.text)
        yield emit("response.output_item.done", output_index=block.index, item=_item(block, item_id))


def _item(block: Block, item_id: str) -> dict[str, Any]:
    if block.kind == "call":
        return {"id": item_id, "type": "function_call", "status": "completed", "call_id": block.id,
                "name": block.name, "arguments": block.text}  # fmt: skip
    if block.kind == "custom":
        return {"id": item_id, "type": "custom_tool_call", "status": "completed", "call_id": block.id,
                "name": block.name, "input": block.text}  # fmt: skip
    if block.kind == "reasoning":
        text = {"type": "reasoning_text", "text": block.text}
        return {"id": item_id, "type": "reasoning", "summary": [], "content": [text], "status": "completed"}
    return {"id": item_id, "type": "message", "status": "completed", "role": "assistant", "content": [_part(block)]}


def _part(block: Block) -> dict[str, Any]:
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": _logprobs(block.logprobs)}


def _logprobs(tokens: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
    return [{**_token(one), "top_logprobs": [_token(other) for other in one.top]} for one in tokens]


def _token(one: TokenLogprob) -> dict[str, Any]:
    return {"token": one.text, "logprob": one.logprob, "bytes": list(one.bytes)}


def _new_id(block: Block) -> str:
    return f"{_PREFIX[block.kind]}_{secrets.token_hex(16)}"


def usage_json(usage: Usage) -> dict[str, Any]:
    """Usage in this API's form."""
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.completion,
        **usage.own_json,
    }
