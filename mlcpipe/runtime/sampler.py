"""The next tokens of sequences from their logits: one call of each compiled sampling function for all rows.

A row's token depends only on its logits, its settings and its position: it is the same alone and in any batch.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from concurrent.futures import TimeoutError as LateError
from contextlib import suppress
from copy import copy
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlcpipe.bundle.model_info import WholeAnswerInfo
from mlcpipe.devices.base import Reused
from mlcpipe.devices.support import tvm_runtime
from mlcpipe.errors import ComputeError, MlcpipeError, last_line
from mlcpipe.runtime.loading import LoadedBundle
from mlcpipe.runtime.random_numbers import Uniforms
from mlcpipe.runtime.sampling_params import SamplingParams, TokenLogprob
from mlcpipe.runtime.serving.grammar import Matcher
from mlcpipe.runtime.serving.whole_answer import MEASURES
from mlcpipe.runtime.text.tokenizer import Tokenizer
from mlcpipe.runtime.token_rules import RowRules
from tir_schedules.sampling import DRAWS

_MIN_TEMPERATURE = 1e-6  # as the compiled softmax
_MIN_ENTRIES = 256  # of counts: most steps launch the same kernels, however many tokens there are
_THREAD = "mlcpipe-masks"
_DTYPES = {"f": "float32", "i": "int32"}
PATIENCE_S = 0.02  # for which all rows of a step wait for masks


class Row:
    """How the tokens of one sequence are sampled, and those sampled so far.

    The repetition penalty counts `prompt` and answer (as transformers), presence and frequency the answer (as OpenAI).
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int] = (),
        matcher: Matcher | None = None,
        rules: Callable[[int], RowRules] | None = None,
    ) -> None:
        """`rules` makes those of this row for the seed of its random numbers."""
        self.params, self.matcher = params, matcher
        self.ahead: tuple[int, ...] = ()  # tokens of a draft that the matcher has not accepted
        self.mask_error: MlcpipeError | None = None
        seed = secrets.randbits(64) if params.seed is None else params.seed
        self.numbers = Uniforms(seed)
        self.rules = None if rules is None else rules(seed)
        self.compiled = params if self.rules is None else self.rules.compiled(params)  # of the compiled function
        if not params.greedy:
            self.numbers.at(len(prompt))  # the first ones take longest, so not during a step
        # Counts with (presence, frequency, repetition) penalty, each kind in a separate call.
        self.repetition = self.presence = None
        if params.repetition_penalty != 1.0:
            self.repetition = _Counts(prompt, (0.0, 0.0, params.repetition_penalty))
        if params.presence_penalty or params.frequency_penalty:
            self.presence = _Counts((), (params.presence_penalty, params.frequency_penalty, 1.0))

    def after(self, draft: Sequence[int]) -> Row:
        """This row as it will be after sampling these tokens; the same object if that makes no difference."""
        if not draft or (self.matcher is None and self.repetition is None and self.presence is None):
            return self
        row = copy(self)
        row.ahead = tuple(draft)
        row.repetition, row.presence = (
            None if counts is None else counts.after(draft) for counts in (self.repetition, self.presence)
        )
        return row

    def ready(self) -> bool:
        """Whether the next token can be sampled without making others wait."""
        return self.matcher is None or self.matcher.ready()

    def allowed(self, draft: list[int]) -> int:
        """How many tokens of a draft the grammar allows, without one that ends it, as no token follows that.

        None with rules, which take one token after the other.
        """
        if self.rules is not None:
            return 0
        return len(draft) if self.matcher is None else self.matcher.allowed(draft)

    def accept(self, token: int) -> None:
        """Count a sampled token. Raises UsageError for a grammar that takes too much."""
        for counts in (self.repetition, self.presence):
            if counts is not None:
                counts.add(token)
        if self.rules is not None:
            self.rules.accept(token)
        if self.matcher is not None:
            self.matcher.accept(token)


class _Counts:
    """How often tokens occurred, and the penalties for that."""

    def __init__(self, tokens: Sequence[int], strengths: tuple[float, float, float]) -> None:
        self.strengths = strengths
        found, counts = np.unique(np.array(tokens, np.int32), return_counts=True)
        self._entry = {token: entry for entry, token in enumerate(found.tolist())}
        self._table = np.zeros((2, max(_MIN_ENTRIES, 2 * len(found))), np.int32)
        self._table[:, : len(found)] = found, counts
        self._spare = 1 << 31

    def after(self, tokens: Sequence[int]) -> _Counts:
        """A copy with more tokens."""
        counts = copy(self)
        counts._entry, counts._table = dict(self._entry), self._table.copy()
        for token in tokens:
            counts.add(token)
        return counts

    def add(self, token: int) -> None:
        """Count an occurrence."""
        entry = self._entry.setdefault(token, len(self._entry))
        if entry == self._table.shape[1]:
            self._table = np.pad(self._table, ((0, 0), (0, entry)))
        self._table[0, entry] = token
        self._table[1, entry] += 1

    @property
    def table(self) -> NDArray[np.int32]:
        """Tokens and how often each occurred: i32[2, n]."""
        return self._table[:, : len(self._entry)]

    def spare(self, vocab: int) -> int:
        """A token that did not occur, -1 if all did."""
        self._spare = min(self._spare, vocab - 1)
        while self._spare in self._entry:
            self._spare -= 1
        return self._spare


class Masks:
    """The masks of the rows that have a grammar, computed in turn by another thread, or rules.

    Rows whose masks are `late` are sampled without one, so that others need not wait; their tokens are discarded.
    """

    def __init__(self, rows: Sequence[Row], vocab: int, thread: Executor) -> None:
        self.late: set[int] = set()
        self._rows = {index: row for index, row in enumerate(rows) if row.matcher is not None}
        self._words = np.full((len(rows), -(-vocab // 32)), -1, np.int32)
        self._ruled = {index: row.rules for index, row in enumerate(rows) if row.rules is not None}
        for index in self._ruled.keys() - self._rows.keys():
            rows[index].mask_error = _restricted(rows[index], self._words[index])
        self._done: set[int] = set()
        self._current: Matcher | None = None
        self._lock, self._closed = threading.Lock(), False
        self._job = thread.submit(self._fill) if self._rows else None

    def _fill(self) -> None:
        for index, row in self._rows.items():
            with self._lock:
                if self._closed:
                    return
                self._current = row.matcher
            words = self._words[index].copy()
            error = _filled(row, words)
            with self._lock:
                if self._closed:
                    return
                self._words[index], row.mask_error, self._current = words, error, None
                self._done.add(index)

    def taken(self) -> tuple[list[int], NDArray[np.int32]]:
        """The rows that have one, and words int32[r, ceil(V / 32)] of all, after a bounded wait."""
        if self._job is not None:
            with suppress(LateError):
                self._job.result(PATIENCE_S)
        with self._lock:
            self._closed = True
            behind = {row.matcher for index, row in self._rows.items() if row.matcher and index not in self._done}
            for matcher in behind:
                matcher.late(self._job if matcher is self._current else None)
        self.late = {index for index, row in self._rows.items() if row.matcher in behind}
        self._words[sorted(self.late)] = -1
        return sorted(self._rows.keys() | self._ruled.keys()), self._words

    def left(self, logits: NDArray[np.float32], positions: Sequence[int]) -> tuple[list[int], NDArray[np.int32]]:
        """As `taken`, of the rows whose rules decide by their logits f32[r, V], which the other masks have changed."""
        rows = [index for index, rules in self._ruled.items() if rules.truncates and index not in self.late]
        for index in rows:
            self._words[index] = self._ruled[index].left(logits[index], positions[index])
        return rows, self._words

    @property
    def truncates(self) -> bool:
        """Whether rules of any row decide by its logits, after `taken`."""
        return any(rules.truncates and index not in self.late for index, rules in self._ruled.items())


class Sampler:
    """The compiled sampling functions over rows of logits.

    A step takes two calls: `prepare` copies numbers to the device, `sample` launches kernels. Rows with a grammar have
    `masks`, which another thread computes during the forward.
    """

    def __init__(self, bundle: LoadedBundle) -> None:
        self._device, self._vocab = bundle.device, bundle.manifest.model.vocab_size
        how = bundle.manifest.model.diffusion
        draw = "sample" if how is None else DRAWS[how.denoises]
        self._order = how.orders[0] if isinstance(how, WholeAnswerInfo) else ""  # where a row says no other
        self._sample, self._penalize, self._add_bias, self._apply_mask = (
            bundle.library.function(name)
            for name in (draw, "apply_penalty_inplace", "apply_logit_bias_inplace", "apply_bitmask_inplace")
        )
        with self._device.errors():
            self._settings, self._draws, self._measures = (self._reused(dtypes) for dtypes in ("ffif", "f", "i"))
            self._bias, self._mask = self._reused("iif"), self._reused("ii")
            self._less, self._left = self._reused("iif"), self._reused("ii")  # of rules
            self._penalties = [self._reused("iiiif") for _ in range(2)]  # as a row may have both kinds of counts
        self._rows: list[Row] = []
        self._positions: Sequence[int] = ()
        # Functions that change logits, each with its other arguments.
        self._calls: list[tuple[Any, ...]] = []
        self._bias_calls: list[tuple[Any, ...]] = []
        self._arguments: list[Any] = []  # of `sample`
        self._viewed: tuple[Any, Any] = None, None  # the last logits, as `sample` takes them
        self._thread = ThreadPoolExecutor(1, _THREAD)

    def masks(self, rows: Sequence[Row]) -> Masks | None:
        """The masks of the rows that have a grammar, which another thread computes from now on, or rules."""
        if all(row.matcher is None and row.rules is None for row in rows):
            return None
        return Masks(rows, self._vocab, self._thread)

    def prepare(self, rows: list[Row], positions: Sequence[int]) -> Hashable:
        """Copy the settings and random numbers for these positions of the rows; equal keys mean equal launches."""
        new = self._rows != rows
        if new:
            self._rows = []  # in case an error or Ctrl-C interrupts what follows
            params = [row.compiled for row in rows]
            top_k = [p.top_k if p.top_k < self._vocab else 0 for p in params]
            columns = [p.temperature for p in params], [p.top_p for p in params], top_k, [p.min_p for p in params]
            self._arguments, self._bias_calls = _put(self._settings, *columns), self._put_bias(rows)
        if new or not all(row.params.greedy for row in rows):
            draws = [0.0 if row.params.greedy else row.numbers.at(at) for row, at in zip(rows, positions)]
            self._arguments[4:5] = _put(self._draws, draws)
        if new and self._order:
            measures = [MEASURES.get(row.params.remasking or self._order, 0) for row in rows]
            self._arguments[5:] = _put(self._measures, measures)
        self._calls, self._rows = [*self._put_penalties(rows), *self._bias_calls, *self._put_less(rows)], rows
        self._positions = positions
        return (*self._calls, *self._arguments)

    def sample(self, logits: Any, masks: Masks | None = None) -> Any:
        """The tokens i32[r] for logits f32[r, V], which penalties, bias and masks change in place; -1 for NaN.

        Of a bundle that denoises blocks or answers with their probabilities, or other measures of the rows, f32[r].
        """
        for change, *arguments in self._calls:
            change(logits, *arguments)
        if masks is not None:
            self._apply_mask(logits, *_put(self._mask, *masks.taken()))
            if masks.late:  # the thread is still busy
                self._thread.shutdown(wait=False)
                self._thread = ThreadPoolExecutor(1, _THREAD)
            if masks.truncates:
                rows, words = masks.left(tvm_runtime.array(self._device.read(logits)), self._positions)
                self._apply_mask(logits, *_put(self._left, rows, words))
        if logits is not self._viewed[0]:
            self._viewed = logits, tvm_runtime.view(logits, (logits.shape[0], 1, self._vocab))
        return self._sample(self._viewed[1], *self._arguments)

    def _put_penalties(self, rows: Sequence[Row]) -> Iterator[tuple[Any, ...]]:
        kinds = [row.repetition for row in rows], [row.presence for row in rows]
        for buffers, counts in zip(self._penalties, kinds):
            chosen = [(index, one) for index, one in enumerate(counts) if one is not None]
            if chosen:
                yield self._penalize, *_put(buffers, *_penalties(chosen, self._vocab))

    def _put_bias(self, rows: Sequence[Row]) -> list[tuple[Any, ...]]:
        wanted = [(i, *pair) for i, row in enumerate(rows) for pair in row.params.logit_bias.items()]
        return [(self._add_bias, *_put(self._bias, *zip(*wanted)))] if wanted else []

    def _put_less(self, rows: Sequence[Row]) -> list[tuple[Any, ...]]:
        wanted = [
            (index, *pair)
            for index, row in enumerate(rows)
            if row.rules is not None
            for pair in zip(*row.rules.penalties())
        ]
        return [(self._add_bias, *_put(self._less, *zip(*wanted)))] if wanted else []

    def _reused(self, dtypes: str) -> list[Reused]:
        return [Reused(self._device, _DTYPES[dtype]) for dtype in dtypes]


def _put(buffers: Sequence[Reused], *values: Any) -> list[Any]:
    return [buffer.put(np.asarray(each, buffer.dtype)) for buffer, each in zip(buffers, values)]


def _penalties(chosen: Sequence[tuple[int, _Counts]], vocab: int) -> tuple[Any, ...]:
    """The arguments of `apply_penalty_inplace` for rows of logits, padded to a power of two of entries.

    Padding names a token that did not occur in the first row, and penalties that change nothing.
    """
    rows, counts = zip(*chosen)
    tables = [one.table for one in counts]
    used, spare = sum(table.shape[1] for table in tables), counts[0].spare(vocab)
    size = used if spare < 0 else max(_MIN_ENTRIES, 1 << used.bit_length())
    entries = np.empty((3, size), np.int32)
    end = 0
    for number, table in enumerate(tables):
        begin, end = end, end + table.shape[1]
        entries[0, begin:end] = number
        entries[1:, begin:end] = table
    entries[0, end:], entries[1, end:], entries[2, end:] = len(counts), spare, 0
    return (*rows, rows[0]), *entries, [*(one.strengths for one in counts), (0.0, 0.0, 1.0)]


def _filled(row: Row, words: NDArray[np.int32]) -> MlcpipeError | None:
    """Write the mask of a row; one that fails allows all, and its error ends the answer."""
    assert row.matcher is not None
    try:
        row.matcher.fill(words, row.ahead)
        return _restricted(row, words)
    except MlcpipeError as error:
        return error
    except Exception as error:
        return ComputeError("the grammar failed", found=last_line(error))


def _restricted(row: Row, words: NDArray[np.int32]) -> MlcpipeError | None:
    """Apply a row's rules to its mask."""
    try:
        if row.rules is not None:
            row.rules.restrict(words)
        return None
    except MlcpipeError as error:
        return error


def log_probabilities(
    logits: NDArray[np.float32], token: int, params: SamplingParams, count: int
) -> tuple[float, list[tuple[int, float]]]:
    """Log-probability of the token that was sampled from logits f32[V], and the `count` most probable tokens'."""
    temperature = np.float32(1.0 if params.greedy else max(params.temperature, _MIN_TEMPERATURE))
    with np.errstate(over="ignore"):  # masked tokens have the lowest finite logit
        logs = logits - logits.max()
        if temperature != 1:
            logs /= temperature
    if not count:
        own = logs[token]
        return float(own - np.log(np.exp(logs, out=logs).sum(dtype=np.float64)).astype(np.float32)), []
    logs -= np.log(np.exp(logs).sum(dtype=np.float64)).astype(np.float32)
    count = min(count, len(logs))
    best = np.argpartition(-logs, count - 1)[:count]
    best = best[np.argsort(-logs[best], kind="stable")]
    return float(logs[token]), [(int(index), float(logs[index])) for index in best]


def named_logprob(
    tokenizer: Tokenizer, token: int, logprob: float, top: Sequence[tuple[int, float]] = ()
) -> TokenLogprob:
    """The log-probabilities of a token and its alternatives, with their texts."""
    raw = tokenizer.token_bytes(token)
    others = [named_logprob(tokenizer, *one) for one in top]
    return TokenLogprob(token, raw.decode("utf-8", errors="replace"), raw, logprob, others)
