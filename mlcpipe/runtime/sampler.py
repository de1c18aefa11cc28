"""The next token from logits: the compiled sampling functions with the settings and history of one generation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlcpipe.errors import UsageError
from mlcpipe.runtime import tvm_runtime
from mlcpipe.runtime.library import Library
from mlcpipe.runtime.places import Place
from mlcpipe.runtime.sampling_params import SamplingParams, TokenLogprob
from mlcpipe.runtime.tokenizer import Tokenizer

_COLDEST = 1e-6  # as the compiled softmax


@dataclass(frozen=True, eq=False)
class _Drawing:
    """The next token i32[1] of logits f32[1, 1, V], which a bias changes in place, by functions of the library."""

    sample: Callable[..., Any]
    settings: tuple[Any, ...]
    bias: Callable[..., Any] | None
    bias_args: tuple[Any, ...]

    def __call__(self, logits: Any) -> Any:
        if self.bias is not None:
            self.bias(_flat(logits), *self.bias_args)
        return self.sample(logits, *self.settings)


class Sampler:
    """Draws tokens one after another, where the model runs; the same seed and logits give the same tokens.

    Repetition penalty counts prompt and answer (as transformers), presence and frequency the answer (as OpenAI).
    """

    def __init__(self, library: Library, params: SamplingParams, prompt: Sequence[int]) -> None:
        vocab = library.manifest.model.vocab_size
        outside = [token for token in params.logit_bias if not 0 <= token < vocab]
        if outside:
            raise UsageError("logit_bias names a token", expected=f"ids from 0 to {vocab - 1}", found=outside[0])
        self._params = params
        self._library, self._place = library, library.place
        settings = (
            self._tensor([params.temperature], "float32"),
            self._tensor([params.top_p], "float32"),
            self._tensor([params.top_k if params.top_k < vocab else 0], "int32"),
            self._tensor([params.min_p], "float32"),
        )
        self._draw_value = np.zeros(1, np.float32)
        self._draw = self._tensor([0.0], "float32")
        self._is_next = False  # whether that is the number for the next token
        bias, bias_args = self._bias(params)
        self._drawn = _Drawing(library.function("sample"), (*settings, self._draw), bias, bias_args)
        self._random = np.random.default_rng(params.seed)
        self._seen = self._answer = None
        if params.repetition_penalty != 1.0:
            self._seen = _Counts(self._place, prompt)
        if params.presence_penalty or params.frequency_penalty:
            self._answer = _Counts(self._place, ())
        if self._seen is not None or self._answer is not None:
            self._penalty = library.function("apply_penalty_inplace")
            self._row = self._tensor([0], "int32")
            self._repetition = self._tensor([(0.0, 0.0, params.repetition_penalty)], "float32")
            self._additive = self._tensor([(params.presence_penalty, params.frequency_penalty, 1.0)], "float32")

    def next(self, logits: Any) -> int:
        """The next token for logits f32[1, 1, V], which penalties and bias change in place."""
        with self._place.errors():
            drawn = self._library.drawn(logits)
            if drawn is None:
                self._next_number()
                drawn = self._library.beside(lambda: self._penalized(logits))
            token = int(self._library.read(drawn)[0])
        self._is_next = False
        for counts in (self._seen, self._answer):
            if counts is not None:
                counts.add(token)
        return token

    def ahead(self) -> Callable[[Any], Any] | None:
        """As `library.Sampling` has it; penalties depend on the tokens so far."""
        if self._seen is not None or self._answer is not None:
            return None
        self._next_number()
        return self._drawn

    def _next_number(self) -> None:
        """Have the random number for the next token on the device."""
        if not self._params.greedy and not self._is_next:
            self._draw_value[0] = self._random.random(dtype=np.float32)
            self._place.put(self._draw, self._draw_value)
        self._is_next = True

    def _penalized(self, logits: Any) -> Any:
        if self._seen is not None and len(self._seen):
            self._penalty(_flat(logits), self._row, *self._seen.tensors(), self._repetition)
        if self._answer is not None and len(self._answer):
            self._penalty(_flat(logits), self._row, *self._answer.tensors(), self._additive)
        return self._drawn(logits)

    def _bias(self, params: SamplingParams) -> tuple[Callable[..., Any] | None, tuple[Any, ...]]:
        """What adds the bias, and its arguments after the logits."""
        if not params.logit_bias:
            return None, ()
        rows, ids = self._tensor([0] * len(params.logit_bias), "int32"), self._tensor(list(params.logit_bias), "int32")
        values = self._tensor(list(params.logit_bias.values()), "float32")
        return self._library.function("apply_logit_bias_inplace"), (rows, ids, values)

    def logprob(self, logits: Any, token: int, tokenizer: Tokenizer) -> TokenLogprob:
        """Log-probability of the token that `next` took, with the `params.logprobs` most probable ones."""
        temperature = np.float32(1.0 if self._params.greedy else max(self._params.temperature, _COLDEST))
        flat = self._library.read(logits).reshape(-1)
        logs = (flat - flat.max()) / temperature
        logs -= np.log(np.exp(logs).sum(dtype=np.float64)).astype(np.float32)
        count = min(self._params.logprobs, len(logs))
        best = np.argpartition(-logs, count - 1)[:count] if count else np.zeros(0, np.int64)
        best = best[np.argsort(-logs[best], kind="stable")]
        top = [_named(tokenizer, int(i), logs) for i in best]
        chosen = _named(tokenizer, token, logs)
        return TokenLogprob(chosen.token_id, chosen.text, chosen.bytes, chosen.logprob, top)

    def _tensor(self, values: Sequence[float] | Sequence[Sequence[float]], dtype: str) -> Any:
        return self._place.tensor(np.array(values, dtype))


class _Counts:
    """How often each token occurred, in tensors that grow by doubling: most tokens cost no allocation."""

    def __init__(self, place: Place, tokens: Sequence[int]) -> None:
        self._place = place
        self._slots: dict[int, int] = {}
        self._ids: NDArray[Any] = np.zeros(0, np.int32)
        self._times = self._ids
        self._grow(256)
        for token in tokens:
            self.add(token)

    def __len__(self) -> int:
        return len(self._slots)

    def add(self, token: int) -> None:
        """One more occurrence."""
        slot = self._slots.setdefault(int(token), len(self._slots))
        if slot == len(self._ids):
            self._grow(2 * slot)
        self._ids[slot] = token
        self._times[slot] += 1

    def tensors(self) -> tuple[Any, Any, Any]:
        """(row, id, count) of each token, all i32[number of different tokens], valid until the next `add`."""
        count = len(self._slots)
        rows, ids, times = (tvm_runtime.view(tensor, (count,)) for tensor in self._tensors)
        self._place.put(ids, self._ids[:count])
        self._place.put(times, self._times[:count])
        return rows, ids, times

    def _grow(self, room: int) -> None:
        ids, times = np.zeros(room, np.int32), np.zeros(room, np.int32)
        ids[: len(self._ids)], times[: len(self._times)] = self._ids, self._times
        self._ids, self._times = ids, times
        self._tensors = [self._place.tensor(np.zeros(room, np.int32)) for _ in range(3)]


def _flat(logits: Any) -> Any:
    """Logits [1, 1, V] as [1, V]."""
    return tvm_runtime.view(logits, (1, logits.shape[2]))


def _named(tokenizer: Tokenizer, token: int, logs: NDArray[np.float32]) -> TokenLogprob:
    raw = tokenizer.token_bytes(token)
    return TokenLogprob(token, raw.decode("utf-8", errors="replace"), raw, float(logs[token]))
