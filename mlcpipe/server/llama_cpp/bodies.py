"""llama-server's fields as ours."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from pydantic import Field

from mlcpipe.runtime.sampling_params import MAX_LOGPROBS
from mlcpipe.runtime.text.tokenizer import Tokenizer
from mlcpipe.server.bodies import MAX_BIASES, MAX_CHOICES, MAX_IDS, Body, Count, Number, translated
from mlcpipe.server.completions import CompletionBody
from mlcpipe.server.errors import ApiError
from mlcpipe.server.mixed_prompts import check_texts, listed_prompts, mixed_ids
from mlcpipe.server.samplers import sampled
from mlcpipe.server.service import Service

_MOST_BIAS = 100.0
_TOKEN = re.compile(r"-?[0-9]+")
_NOT_TOLD = ("echo", "prompt_logprobs")  # /v1/completions has them
_MOST_DIGITS = 18  # of a token's id


class TextFields(Body):
    """The fields of `/completion` and `/infill`, beside the prompt."""

    most_values = MAX_IDS
    model: str | None = None
    n_predict: Count | None = Field(None, ge=-2)
    max_tokens: Count | None = Field(None, ge=-1)
    n_cmpl: Count | None = Field(None, ge=1, le=MAX_CHOICES)
    n: Count | None = Field(None, ge=1, le=MAX_CHOICES)  # another name of `n_cmpl`
    n_probs: Count | None = Field(None, ge=0, le=MAX_LOGPROBS)
    logprobs: Count | None = Field(None, ge=0, le=MAX_LOGPROBS)  # another name of `n_probs`
    n_indent: Count | None = Field(None, ge=0)
    stop: str | list[str] | None = None
    stream: bool | None = None
    samplers: list[str] | None = None
    seed: Count | None = None
    logit_bias: Any = None
    t_max_predict_ms: Number | None = None
    response_fields: list[str] | None = None
    return_tokens: bool | None = None
    return_progress: bool | None = None
    timings_per_token: bool | None = None
    post_sampling_probs: bool | None = None
    # Of no effect on an answer: prompts are always cached, and requests have no slots.
    cache_prompt: bool | None = None
    id_slot: int | None = None
    n_keep: int | None = None
    t_max_prompt_ms: float | None = None

    @property
    def most(self) -> int | None:
        """Tokens of an answer; None for as many as the context has, 0 to compute the prompt alone."""
        given = self.max_tokens if self.n_predict is None else self.n_predict
        return None if given is None or given < 0 else given

    @property
    def alternatives(self) -> int:
        """Alternatives of each token whose probability is told; 0 tells of none."""
        return (self.logprobs if self.n_probs is None else self.n_probs) or 0

    @property
    def answers(self) -> int | None:
        """How many answers each prompt gets; None is one."""
        return self.n if self.n_cmpl is None else self.n_cmpl

    def completion(self, service: Service, prompts: list[list[int]], stop_ids: Sequence[int] = ()) -> CompletionBody:
        """The body for prompts of tokens. Raises ApiError, which names the field."""
        extra = dict(self.model_extra or {})
        for name in _NOT_TOLD:
            if extra.get(name) not in (None, False):
                raise ApiError(400, f"{name}: not offered here; leave it out", param=name, code="unsupported_parameter")
        ends = extra.get("stop_token_ids") or []
        made = translated(
            CompletionBody,
            {
                **extra,
                **sampled(extra, self.samplers),
                "model": self.model,
                "prompt": prompts,
                "n": self.answers,
                "max_tokens": max(1, self.most) if self.most is not None else service.engine.context_length,
                "stop": [self.stop] if isinstance(self.stop, str) else self.stop,
                "seed": None if self.seed == -1 else self.seed,
                "logit_bias": biases(service.tokenizer, self.logit_bias),
                "logprobs": self._logprobs(len(prompts)),
                "stream": self.stream,
                "return_progress": self.return_progress,
                "stop_token_ids": [*ends, *stop_ids] if isinstance(ends, list) else ends,
            },
            self,
        )
        if self.post_sampling_probs and self.alternatives:
            made.tell_what_is_left()
        return made

    def _logprobs(self, prompts: int) -> int | None:
        """They also tell the tokens, and count those of several answers apart."""
        needed = self.return_tokens or self.stream or prompts * (self.answers or 1) > 1
        return self.alternatives or (0 if needed else None)


class CompletionFields(TextFields):
    """The body of `/completion`."""

    prompt: Any

    def prompts(self, tokenizer: Tokenizer) -> list[list[int]]:
        """The tokens of each prompt: a text, tokens, both mixed, or a list of such. Raises ApiError."""
        prompts = listed_prompts(self.prompt)
        if not 0 < len(prompts) <= MAX_CHOICES:
            raise ApiError(400, f"prompt: expected 1 to {MAX_CHOICES} prompts, found {len(prompts)}", param="prompt")
        parts = [part for one in prompts if isinstance(one, list) for part in one]
        check_texts(tokenizer, parts, "prompt", chars=False)
        return [mixed_ids(tokenizer, one, "prompt") for one in prompts]


def biases(tokenizer: Tokenizer, given: Any) -> dict[str, float] | None:
    """Biases by token, of an object or of pairs, whose tokens may be texts; false forbids one. Raises ApiError."""
    if given is None or given == []:
        return None
    pairs = list(given.items()) if isinstance(given, dict) else given
    made: dict[str, float] = {}
    if not isinstance(pairs, list) or len(pairs) > MAX_BIASES:
        raise ApiError(400, f"logit_bias: expected at most {MAX_BIASES} tokens with a bias", param="logit_bias")
    keys = [pair[0] for pair in pairs if isinstance(pair, (list, tuple)) and pair]
    tokenizer.check_length(sum(len(key) for key in keys if isinstance(key, str)))
    for pair in pairs:
        token, bias = pair if isinstance(pair, (list, tuple)) and len(pair) == 2 else (None, None)
        bias = -_MOST_BIAS if bias is False else bias
        if type(bias) not in (int, float) or not isinstance(token, (int, str)):
            raise ApiError(400, "logit_bias: expected tokens, each with a number or false", param="logit_bias")
        assert isinstance(bias, (int, float))
        if not abs(bias) <= _MOST_BIAS:
            raise ApiError(
                400, f"logit_bias: expected numbers in [-{_MOST_BIAS:g}, {_MOST_BIAS:g}]", param="logit_bias"
            )
        if isinstance(token, str) and not _TOKEN.fullmatch(token):
            ids = tokenizer.encode(token)
        elif abs(token) < 10**_MOST_DIGITS if isinstance(token, int) else len(token) <= _MOST_DIGITS:
            ids = [int(token)]
        else:
            raise ApiError(400, f"logit_bias: expected ids of at most {_MOST_DIGITS} digits", param="logit_bias")
        made.update({str(one): float(bias) for one in ids})
    return made
