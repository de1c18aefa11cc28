"""The text of one window: greedy, then drawn at rising temperatures while the answer looks wrong."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mlcpipe.errors import ComputeError, UsageError
from mlcpipe.runtime.speech.hearing import Floats, Hearing
from mlcpipe.runtime.speech.rules import TokenRules, log_sum_exp

TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


def rising(first: float) -> tuple[float, ...]:
    """The temperatures from the first on: 0, 0.2, ... 1, or from another one in such steps."""
    if not 0 <= first <= 1:
        raise UsageError("temperature", expected="from 0 to 1", found=first)
    return tuple(round(first + step, 6) for step in TEMPERATURES if first + step <= 1 + 1e-6)


@dataclass(frozen=True)
class Heard:
    """The answer to a window: tokens without the end, the mean log-probability of them with it, ..."""

    tokens: tuple[int, ...]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


@dataclass(frozen=True)
class Limits:
    """When an answer is taken for wrong; None: never for that reason. Those of the published program."""

    compression_ratio: float | None = 2.4
    logprob: float | None = -1.0
    no_speech: float | None = 0.6

    def is_silence(self, heard: Heard) -> bool:
        """Whether a window has no speech: it is probable, and the text is not."""
        if self.no_speech is None or heard.no_speech_prob <= self.no_speech:
            return False
        return self.logprob is None or heard.avg_logprob <= self.logprob

    def is_wrong(self, heard: Heard) -> bool:
        """Whether an answer repeats itself, or is improbable without being silence."""
        improbable = self.logprob is not None and heard.avg_logprob < self.logprob
        if self.no_speech is not None and heard.no_speech_prob > self.no_speech and improbable:
            return False
        repeats = self.compression_ratio is not None and heard.compression_ratio > self.compression_ratio
        return repeats or improbable


def heard_text(
    hearing: Hearing,
    prompt: Sequence[int],
    start: int,
    rules: TokenRules,
    most: int,
    temperatures: Sequence[float],
    limits: Limits,
    decode: Callable[[Sequence[int]], str],
    rng: np.random.Generator,
    best_of: int,
) -> Heard:
    """The answer at the first of `temperatures` that is not wrong, or the last one.

    Args:
        hearing: has heard the window, and is locked.
        prompt: tokens; the one at index `start` begins the answer.
        rules: of the next token.
        most: tokens of an answer.
        temperatures: 0 takes the most probable token, others draw `best_of` answers, of which the most probable counts.
        limits: when an answer is wrong.
        decode: the text of tokens.
        rng: draws.
        best_of: answers.
    """
    most = min(most, hearing.context_length - len(prompt))
    found: Heard | None = None
    first = hearing.begin(prompt, [start, len(prompt) - 1]).copy()
    no_speech, ready = _probability(first[0], hearing.info.no_speech), 1
    for temperature in temperatures:
        answers = best_of if temperature > 0 else 1
        hearing.begin_others(prompt, ready, answers)
        ready = max(ready, answers)
        drawn = _answers(hearing, first[1], len(prompt), rules, most, temperature, answers, rng)
        tokens, mean = max(drawn, key=lambda one: one[1])
        text = decode([one for one in tokens if one < hearing.info.end]).strip()
        found = Heard(tuple(tokens), temperature, mean, compression_ratio(text), no_speech)
        if not limits.is_wrong(found):
            break
    assert found is not None
    return found


def _answers(
    hearing: Hearing, first: Floats, begin: int, rules: TokenRules, most: int, temperature: float, count: int,
    rng: np.random.Generator,
) -> list[tuple[list[int], float]]:  # fmt: skip
    """Some answers, without their ends, and the mean log-probability of each."""
    end = hearing.info.end
    tokens: list[list[int]] = [[] for _ in range(count)]
    sums, running = [0.0] * count, list(range(count))
    logits = np.repeat(first[None], count, axis=0)
    for index in range(most):
        going = []
        for row, answer in enumerate(running):
            rules.apply(logits[row], tokens[answer])
            token, logprob = _drawn(logits[row], temperature, rng)
            sums[answer] += logprob
            if token != end:
                tokens[answer].append(token)
                going.append(answer)
        running = going
        if not running or index + 1 == most:
            break
        logits = hearing.decode(running, [tokens[one][-1] for one in running], begin + index)
    return [(one, total / (len(one) + 1)) for one, total in zip(tokens, sums)]


def _drawn(logits: Floats, temperature: float, rng: np.random.Generator) -> tuple[int, float]:
    """A token, and its log-probability at temperature 1. Raises ComputeError where no token is possible."""
    total = log_sum_exp(logits)
    if not np.isfinite(total):
        raise ComputeError("the model computed numbers that are not finite", next_step="compile the model again")
    token = int(logits.argmax())
    if temperature > 0:
        weights = np.exp((logits - logits[token]).astype(np.float64) / temperature)
        ends = weights.cumsum()
        token = min(int(np.searchsorted(ends, rng.random() * ends[-1], side="right")), len(logits) - 1)
    return token, float(logits[token]) - total


def _probability(logits: Floats, token: int | None) -> float:
    """The probability of a token; 0 for none."""
    return 0.0 if token is None else float(np.exp(float(logits[token]) - log_sum_exp(logits)))


def compression_ratio(text: str) -> float:
    """Bytes of a text for each byte that zlib makes of it: high for one that repeats itself."""
    data = text.encode()
    return len(data) / len(zlib.compress(data))
