"""`/completion`: texts continued, as llama-server has it."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse

from mlcpipe.runtime.sampling_params import TokenLogprob
from mlcpipe.server.answers import LOWEST_LOGPROB, Answers, Delta, Usage
from mlcpipe.server.bodies import body_schema, parsed
from mlcpipe.server.completions import CompletionBody, answers_to_texts
from mlcpipe.server.errors import ApiError
from mlcpipe.server.leases import text_service
from mlcpipe.server.llama_cpp.bodies import CompletionFields, TextFields
from mlcpipe.server.llama_cpp.cuts import Cut
from mlcpipe.server.service import Service
from mlcpipe.server.sse import EventStream, event, unless_left
from mlcpipe.server.timings import PromptProgress, timings

router = APIRouter()
MAX_FIELDS = 64
_NO_SLOT = -1


@router.post("/completion", openapi_extra=body_schema(CompletionFields), response_model=None)
async def complete(
    request: Request, body: Annotated[CompletionFields, Depends(parsed(CompletionFields))]
) -> EventStream | JSONResponse:
    """Continue one or more texts."""
    service = await text_service(request, body.model)
    prompts = await service.apart(lambda: body.prompts(service.tokenizer), body.nbytes)
    return await continued(request, service, body, prompts)


async def continued(
    request: Request, service: Service, body: TextFields, prompts: list[list[int]], stop_ids: Sequence[int] = ()
) -> EventStream | JSONResponse:
    """The response to prompts of tokens; `stop_ids` end an answer too. Raises ApiError."""
    if body.response_fields is not None and len(body.response_fields) > MAX_FIELDS:
        raise ApiError(400, f"response_fields: expected at most {MAX_FIELDS}", param="response_fields")
    most = service.engine.vocab_size - 1

    def prepare() -> tuple[CompletionBody, list[str], dict[str, Any]]:
        if not all(0 <= min(one) <= max(one) <= most for one in prompts if one):
            raise ApiError(400, f"prompt: expected ids from 0 to {most}", param="prompt")
        completion = body.completion(service, prompts, stop_ids)
        decode = service.tokenizer.decode
        told = [decode(one, skip_special_tokens=False) for one in prompts]
        return completion, told, _settings(service, body, completion)

    # All that may be refused comes before the answers begin, as they have no reader until then.
    completion, told, settings = await service.apart(prepare, body.nbytes)
    answers, _ = await answers_to_texts(service, completion)
    asked = [one for one in zip(prompts, told) for _ in range(completion.n or 1)]
    name, length = service.name_of(body.model), service.engine.context_length
    texts = [_Text(body, index, tokens, text, settings, name, length)
             for index, (tokens, text) in enumerate(asked)]  # fmt: skip
    if body.stream:
        return EventStream(_events(answers, texts, body), answers.close, lambda error: event(error.body("")))

    async def whole() -> None:
        async for _ in _pieces(answers, texts):
            pass

    await unless_left(request, whole(), answers.close)
    made = [one.end(answers.usage) for one in texts]
    return JSONResponse(made[0] if len(made) == 1 else made)


async def _pieces(answers: Answers, texts: list[_Text]) -> AsyncIterator[tuple[_Text, str, Delta]]:
    """What each token adds to which text, until all have ended."""
    async for delta in answers.deltas():
        text = texts[delta.index]
        if delta.progress is not None:
            yield text, "", delta
        elif not text.ended:
            yield text, text.add(delta, answers.usage.completion if len(texts) == 1 else None), delta
        if all(one.ended for one in texts):
            return  # `close` cancels what is left


async def _events(answers: Answers, texts: list[_Text], body: TextFields) -> AsyncIterator[str]:
    """The events of a stream: prompts' progress, tokens, and an object at the end of each text."""
    progress = {index: PromptProgress(size) for index, size in answers.prompt_sizes.items()}
    timed = bool(body.timings_per_token)
    async for text, piece, delta in _pieces(answers, texts):
        told = progress[delta.index].told(delta, timed=timed) if delta.index in progress else None
        if told is not None:
            made = {"index": delta.index, "content": "", "tokens": [], "stop": False, "id_slot": _NO_SLOT}
            yield event({**made, **told})
        if delta.progress is not None:
            continue
        yield event(text.part(piece, delta, answers.usage))
        if text.ended:
            yield event(text.end(answers.usage, whole=False))


@dataclass
class _Text:
    """One text with what it has so far."""

    body: TextFields
    index: int
    tokens: list[int]
    prompt: str
    settings: Mapping[str, Any]
    model: str
    context_length: int
    content: str = ""
    predicted: int = 0
    ended: bool = False
    ids: list[int] = field(default_factory=list)
    probs: list[dict[str, Any]] = field(default_factory=list)
    stop_type: str = "none"
    stopping_word: str = ""

    def __post_init__(self) -> None:
        most_ms = self.body.t_max_predict_ms
        self._cut = Cut(self.body.n_indent or 0, most_ms / 1000 if most_ms is not None and most_ms > 0 else None)

    def add(self, delta: Delta, counted: int | None) -> str:
        """What a delta adds to the text; `counted` are the tokens so far, None if the delta's are to be counted."""
        self.predicted = self.predicted + len(delta.logprobs) if counted is None else counted
        if self.body.most == 0:  # the token that comes with the prompt's last row
            self.ended, self.stop_type, self.predicted = True, "limit", 0
            return ""
        self.ids += [one.token_id for one in delta.logprobs]
        self.probs += self._probs(delta.logprobs)
        piece = self._cut.take(delta.text)
        self.content += piece
        if delta.finish is not None:
            self.stop_type = "limit" if delta.finish == "length" else "eos" if delta.stop_string is None else "word"
            self.stopping_word = delta.stop_string or ""
            self.ended = True
        if self._cut.ended:
            self.ended, self.stop_type = True, "limit"
        return piece

    def _probs(self, tokens: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        """Log-probabilities of tokens and their alternatives before truncation, or probabilities after it, as far as
        any is left; at temperature 0 one has all.
        """
        if not self.body.alternatives:
            return []
        if not self.body.post_sampling_probs:
            return [{**_told(one, one.logprob), "top_logprobs": [_told(each, each.logprob) for each in one.top]}
                    for one in tokens]  # fmt: skip
        made = []
        for one in tokens:
            if self.settings["temperature"] == 0:
                probs = [(each, float(each.token_id == one.token_id)) for each in one.top]
                own = 1.0
            else:
                probs = [(each, math.exp(each.logprob)) for each in one.top if each.logprob > LOWEST_LOGPROB]
                own = math.exp(one.logprob)
            top = [_told(each, prob, "prob") for each, prob in probs]
            made.append({**_told(one, own, "prob"), "top_probs": top})
        return made

    def part(self, piece: str, delta: Delta, usage: Usage) -> dict[str, Any]:
        """A piece of a stream."""
        made: dict[str, Any] = {
            "index": self.index,
            "content": piece,
            "tokens": [one.token_id for one in delta.logprobs],
            "stop": False,
            "id_slot": _NO_SLOT,
            "tokens_predicted": self.predicted,
            "tokens_evaluated": len(self.tokens),
        }
        if self.body.timings_per_token:
            made["timings"] = timings(usage)
        probs = self._probs(delta.logprobs)
        return {**made, "completion_probabilities": probs} if probs else made

    def end(self, usage: Usage, *, whole: bool = True) -> dict[str, Any]:
        """The object of the `whole` text, or at the end of its stream."""
        made: dict[str, Any] = {
            "index": self.index,
            "content": self.content if whole else "",
            "tokens": self.ids if whole and self.body.return_tokens else [],
            "id_slot": _NO_SLOT,
            "stop": True,
            "model": self.model,
            "tokens_predicted": self.predicted,
            "tokens_evaluated": len(self.tokens),
            "generation_settings": self.settings,
            "prompt": self.prompt,
            "has_new_line": "\n" in self.content,
            "truncated": bool(usage.dropped) or len(self.tokens) + self.predicted >= self.context_length,
            "stop_type": self.stop_type,
            "stopping_word": self.stopping_word,
            "tokens_cached": len(self.tokens) + self.predicted,
            "timings": timings(usage),
        }
        if whole and self.probs:
            made["completion_probabilities"] = self.probs
        return made if not self.body.response_fields else _picked(made, self.body.response_fields)


def _settings(service: Service, body: TextFields, completion: CompletionBody) -> dict[str, Any]:
    """The settings that the answer has, under llama-server's names."""
    params = service.sampling(completion)
    seed = -1 if params.seed is None else params.seed
    return {
        "n_predict": -1 if body.most is None else body.most,
        "seed": seed,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repeat_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "stop": completion.stops,
        "n_probs": body.alternatives,
        "stream": bool(body.stream),
        "timings_per_token": bool(body.timings_per_token),
        "post_sampling_probs": completion.tells_what_is_left,
    }


def _told(token: TokenLogprob, value: float, name: str = "logprob") -> dict[str, Any]:
    return {"id": token.token_id, "token": token.text, "bytes": list(token.bytes), name: value}


def _picked(made: Mapping[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    """The fields at these paths, `timings/prompt_n`, whose names are the paths."""
    out: dict[str, Any] = {}
    for path in paths:
        found: Any = made
        for name in path.split("/"):
            found = found.get(name) if isinstance(found, Mapping) else None
        if found is not None:
            out[path] = found
    return out
