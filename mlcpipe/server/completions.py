"""`/v1/completions`: texts continued, as in OpenAI's legacy API; with `suffix`, the middle between two texts."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse
from pydantic import Field

from mlcpipe.runtime.answer_reader import Reading
from mlcpipe.runtime.sampling_params import MAX_LOGPROBS, TokenLogprob
from mlcpipe.runtime.serving import interface
from mlcpipe.runtime.serving.grammar import GrammarSource
from mlcpipe.runtime.text.tokenizer import Tokenizer
from mlcpipe.server.answers import Answers, check_scores
from mlcpipe.server.bodies import MAX_CHOICES, MAX_IDS, CompletionFields, Count, ResponseFormat, body_schema, parsed
from mlcpipe.server.chat import prompt_json, usage_json
from mlcpipe.server.conversation import within
from mlcpipe.server.errors import ApiError
from mlcpipe.server.leases import text_service
from mlcpipe.server.lora_scales import with_scales
from mlcpipe.server.service import Service, repeated
from mlcpipe.server.sse import DONE, EventStream, choice_events, event, unless_left
from mlcpipe.server.timings import PromptProgress, timings

router = APIRouter()
_DEFAULT_TOKENS = 16  # as OpenAI
# Control tokens before a prefix, before a suffix and before the middle: Qwen2.5-Coder, StarCoder, DeepSeek-Coder.
_FILL_IN = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
)


class CompletionBody(CompletionFields):
    """The body of a request."""

    most_values = MAX_IDS
    adds_special_tokens = True
    prompt: str | list[str] | list[int] | list[list[int]]
    suffix: str | None = None
    echo: bool | None = None
    logprobs: Count | None = Field(None, ge=0, le=MAX_LOGPROBS)
    best_of: int | None = None
    response_format: ResponseFormat | None = None


@router.post("/v1/completions", openapi_extra=body_schema(CompletionBody), response_model=None)
async def complete(
    request: Request, body: Annotated[CompletionBody, Depends(parsed(CompletionBody))]
) -> EventStream | JSONResponse:
    """Continue one or more texts."""
    service = await text_service(request, body.model)
    answers, heads = await answers_to_texts(service, body)
    frame = {
        "id": f"cmpl-{secrets.token_hex(12)}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": service.name_of(body.model),
        "system_fingerprint": service.facts.fingerprint,
    }
    if body.stream:
        chunks = _chunks(service, answers, frame, heads, body)
        return EventStream(chunks, answers.close, lambda error: event(error.body("")) + DONE)
    whole = await unless_left(request, answers.whole(), answers.close)

    def made() -> JSONResponse:
        choices = [
            _choice(index, head + one.text, _joined(answers, index, _echoed(body), one.logprobs, len(head)), one.finish)
            for index, (head, one) in enumerate(zip(heads, whole, strict=True))
        ]
        if body.prompt_logprobs is not None:
            choices = [{**choice, **prompt_json(answers, index)} for index, choice in enumerate(choices)]
        told = {"usage": usage_json(answers.usage), "timings": timings(answers.usage)}
        return JSONResponse({**frame, "choices": choices, **told})

    return await service.aside(made, answers.scores_bytes)


async def answers_to_texts(
    service: Service, body: CompletionBody, most_tokens: int | None = None
) -> tuple[Answers, list[str]]:
    """Request all answers; with `echo`, also the text that each begins with. Raises ApiError.

    `most_tokens`: of a prompt and its answer together, if fewer than the context has.
    """
    service.check(body)
    n = body.n or 1
    if body.best_of is not None and body.best_of != n:
        raise ApiError(400, "best_of: expected n, or nothing", param="best_of", code="unsupported_parameter")
    given: Sequence[Any] = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    texts = [given] if given and isinstance(given[0], int) else given
    if not 0 < len(texts) * n <= MAX_CHOICES:
        raise ApiError(400, f"prompt: expected 1 to {MAX_CHOICES} answers", param="prompt")
    reading = Reading(body.stops, continues=True, silent=body.max_tokens == 0)
    scored = max((each for each in (body.prompt_logprobs, _echoed(body)) if each is not None), default=None)
    rules = await service.rules(body)

    def prepare() -> tuple[list[interface.Request], list[str], GrammarSource | None]:
        prompts = _prompts(service.tokenizer, texts, body.suffix)
        if not all(prompts):
            raise ApiError(400, "prompt: expected at least one token", param="prompt")
        name = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
        check_scores(sum(map(len, prompts)), scored, n, name)
        most = _DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
        asked = [service.request(body, tokens, within(most_tokens, len(tokens), most)) for tokens in prompts]
        heads = [service.tokenizer.decode(tokens) if body.echo else "" for tokens in prompts]
        return asked, heads, service.source(body, body.response_format, "none")

    asked, heads, source = await service.apart(prepare, body.nbytes)
    # One grammar, so that all answers share its time limit.
    grammar = (await service.constrained(asked[0], source)).grammar
    requests = []
    for one in asked:
        request = replace(one, grammar=grammar, logprobs=body.logprobs, prompt_logprobs=scored)
        request = await service.with_rules(request, rules)
        request = await with_scales(service, body, request)
        requests += [(each, reading) for each in repeated(request, n)]
    return service.start(requests), [head for head in heads for _ in range(n)]


def _prompts(tokenizer: Tokenizer, texts: Sequence[Any], suffix: str | None) -> list[list[int]]:
    """The tokens of each prompt. Raises ApiError, and the errors of the tokenizer."""
    if suffix is not None:
        return [_fill_in(tokenizer, text, suffix) for text in texts]
    return [tokenizer.encode(one, add_special_tokens=True) if isinstance(one, str) else list(one) for one in texts]


def fill_in_ids(tokenizer: Tokenizer) -> list[int] | None:
    """The tokens before a prefix, before a suffix and before the middle; None where the model has none."""
    for names in _FILL_IN:
        ids = [tokenizer.encode(name) for name in names]
        if all(len(one) == 1 for one in ids):
            return [one for (one,) in ids]
    return None


def _fill_in(tokenizer: Tokenizer, prefix: object, suffix: str) -> list[int]:
    if not isinstance(prefix, str):
        raise ApiError(400, "suffix: expected a prompt of text", param="suffix")
    ids = fill_in_ids(tokenizer)
    if ids is not None:
        return [ids[0], *tokenizer.encode(prefix), ids[1], *tokenizer.encode(suffix), ids[2]]
    message = "suffix: the model's tokenizer has no tokens to fill in the middle"
    raise ApiError(400, message, param="suffix", code="unsupported_parameter")


def _echoed(body: CompletionBody) -> int | None:
    """How many alternatives each token of the echoed prompt reports, None for no log-probabilities."""
    return body.logprobs if body.echo else None


async def _chunks(
    service: Service, answers: Answers, frame: dict[str, Any], heads: list[str], body: CompletionBody
) -> AsyncIterator[str]:
    with_usage, echoed = body.tells_usage, _echoed(body)
    timed, ended = bool(body.timings_per_token), 0
    progress = {index: PromptProgress(size) for index, size in answers.prompt_sizes.items()}
    frame = {**frame, **({"usage": None} if with_usage else {})}
    made = choice_events(frame)
    offsets = [len(head) for head in heads]
    waiting = set(range(len(heads))) if echoed is not None else set()
    for index, head in enumerate(heads):
        if head and not waiting:
            yield made(_choice(index, head, None, None))

    def begun(index: int) -> str:
        return made(_choice(index, heads[index], _joined(answers, index, echoed, (), 0), None))

    async for one in answers.deltas():
        told = progress[one.index].told(one, timed=timed) if one.index in progress else None
        if told is not None:
            yield event({**frame, "choices": [_choice(one.index, "", None, None)], **told})
        if one.progress is not None:
            continue
        if one.index in waiting:
            waiting.remove(one.index)
            yield await service.aside(partial(begun, one.index), answers.scores_bytes)
        logprobs = _logprobs(one.logprobs, offsets[one.index])
        offsets[one.index] += sum(len(token.text) for token in one.logprobs)
        choice = _choice(one.index, one.text, logprobs, one.finish)
        ended += one.finish is not None
        last = one.finish is not None and ended == answers.count and not with_usage
        more: dict[str, Any] = {"timings": timings(answers.usage)} if timed or last else {}
        if body.tells_usage_so_far:
            more["usage"] = usage_json(answers.usage)
        yield event({**frame, "choices": [choice], **more}) if more else made(choice)
    if with_usage:
        yield event({**frame, "choices": [], "usage": usage_json(answers.usage), "timings": timings(answers.usage)})
    yield DONE


def _choice(index: int, text: str, logprobs: object, finish: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}


def _joined(
    answers: Answers, index: int, echoed: int | None, tokens: Sequence[TokenLogprob], offset: int
) -> dict[str, Any] | None:
    """`_logprobs` of an answer's tokens after those of its prompt, if they are `echoed`."""
    made = _logprobs(tokens, offset)
    if echoed is None:
        return made
    scores = [one for one, _ in answers.prompt_logprobs.get(index, ())]
    first = answers.first_token(index)
    before = _logprobs([first, *(replace(one, top=one.top[:echoed]) for one in scores)], 0)
    assert before is not None
    before["token_logprobs"][0] = before["top_logprobs"][0] = None
    return before if made is None else {name: before[name] + made[name] for name in made}


def _logprobs(tokens: Sequence[TokenLogprob], offset: int) -> dict[str, Any] | None:
    """In the legacy API's form: parallel lists; `offset` is the number of characters before."""
    if not tokens:
        return None
    offsets = []
    for one in tokens:
        offsets.append(offset)
        offset += len(one.text)
    return {
        "tokens": [one.text for one in tokens],
        "token_logprobs": [one.logprob for one in tokens],
        "top_logprobs": [{other.text: other.logprob for other in one.top} for one in tokens],
        "text_offset": offsets,
    }
