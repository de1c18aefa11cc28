"""The next token from logits: the compiled sampling functions with the settings and history of one generation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlcpipe.errors import UsageError
from mlcpipe.runtime import tvm_runtime
from mlcpipe.runtime.library import Library
from mlcpipe.runtime.sampling_params import SamplingParams, TokenLogprob
from mlcpipe.runtime.tokenizer import Tokenizer

_COLDEST = 1e-6  # as the compiled softmax


def _tensor(values: Sequence[float] | Sequence[Sequence[float]], dtype: str) -> Any:
    return tvm_runtime.tensor(np.array(values, dtype))


class Sampler:
    """Draws tokens one after another; the same seed and logits give the same tokens.

    Repetition penalty counts prompt and answer (as transformers), presence and frequency the answer (as OpenAI).
    """

    def __init__(self, library: Library, params: SamplingParams, prompt: Sequence[int]) -> None:
        vocab = library.manifest.model.vocab_size
        outside = [token for token in params.logit_bias if not 0 <= token < vocab]
        if outside:
            raise UsageError("logit_bias names a token", expected=f"ids from 0 to {vocab - 1}", found=outside[0])
        self._params = params
        self._sample = library.function("sample")
        self._softmax = library.function("softmax_with_temperature")
        self._penalty = library.function("apply_penalty_inplace")
        self._bias = library.function("apply_logit_bias_inplace")
        self._settings = (
            _tensor([params.temperature], "float32"),
            _tensor([params.top_p], "float32"),
            _tensor([min(params.top_k, vocab)], "int32"),
            _tensor([params.min_p], "float32"),
        )
        self._draw = _tensor([0.0], "float32")
        self._draw_value = tvm_runtime.array(self._draw)
        self._random = np.random.default_rng(params.seed)
        self._row = _tensor([0], "int32")
        self._repetition = _tensor([(0.0, 0.0, params.repetition_penalty)], "float32")
        self._additive = _tensor([(params.presence_penalty, params.frequency_penalty, 1.0)], "float32")
        self._seen = _Counts(prompt) if params.repetition_penalty != 1.0 else None
        self._answer = _Counts(()) if params.presence_penalty or params.frequency_penalty else None
        self._bias_args = (
            _tensor([0] * len(params.logit_bias), "int32"),
            _tensor(list(params.logit_bias), "int32"),
            _tensor(list(params.logit_bias.values()), "float32"),
        )

    def next(self, logits: Any) -> int:
        """The next token for logits f32[1, 1, V], which penalties and bias change in place."""
        self._adjust(logits)
        if not self._params.greedy:
            self._draw_value[0] = self._random.random(dtype=np.float32)
        token = int(tvm_runtime.array(self._sample(logits, *self._settings, self._draw))[0])
        for counts in (self._seen, self._answer):
            if counts is not None:
                counts.add(token)
        return token

    def logprob(self, logits: Any, token: int, tokenizer: Tokenizer) -> TokenLogprob:
        """Log-probability of the token that `next` took, with the `params.logprobs` most probable ones."""
        temperature = 1.0 if self._params.greedy else max(self._params.temperature, _COLDEST)
        probs = tvm_runtime.array(self._softmax(logits, _tensor([temperature], "float32")))
        flat = tvm_runtime.array(logits).reshape(-1)
        # Not log(probs): a probability below 1e-45 would be 0 and its logarithm minus infinity.
        logs = (flat - flat.max()) / np.float32(temperature) + np.log(probs.max())
        count = min(self._params.logprobs, len(logs))
        best = np.argpartition(-logs, count - 1)[:count] if count else np.zeros(0, np.int64)
        best = best[np.argsort(-logs[best], kind="stable")]
        top = [_named(tokenizer, int(i), logs) for i in best]
        chosen = _named(tokenizer, token, logs)
        return TokenLogprob(chosen.token_id, chosen.text, chosen.bytes, chosen.logprob, top)

    def _adjust(self, logits: Any) -> None:
        if self._seen is None and self._answer is None and not self._params.logit_bias:
            return
        flat = tvm_runtime.view(logits, (1, logits.shape[2]))
        for counts, penalty in ((self._seen, self._repetition), (self._answer, self._additive)):
            if counts is not None and len(counts):
                self._penalty(flat, self._row, *counts.tensors(), penalty)
        if self._params.logit_bias:
            self._bias(flat, *self._bias_args)


class _Counts:
    """How often each token occurred, in tensors that grow by doubling: most tokens cost no allocation."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._slots: dict[int, int] = {}
        self._rows: NDArray[Any] = np.zeros(0, np.int32)
        self._ids = self._times = self._rows
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
        shape = (len(self._slots),)
        rows, ids, times = self._tensors
        return tvm_runtime.view(rows, shape), tvm_runtime.view(ids, shape), tvm_runtime.view(times, shape)

    def _grow(self, room: int) -> None:
        tensors = [tvm_runtime.tensor(np.zeros(room, np.int32)) for _ in range(3)]
        arrays = [tvm_runtime.array(tensor) for tensor in tensors]
        for array, old in zip(arrays, (self._rows, self._ids, self._times)):
            array[: len(old)] = old
        self._tensors = tensors
        self._rows, self._ids, self._times = arrays


def _named(tokenizer: Tokenizer, token: int, logs: NDArray[np.float32]) -> TokenLogprob:
    raw = tokenizer.token_bytes(token)
    return TokenLogprob(token, raw.decode("utf-8", errors="replace"), raw, float(logs[token]))
