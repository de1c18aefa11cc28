"""A loaded bundle with one sequence in its pages: which tokens are computed, and the steps that add to them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlcpipe.devices.support import tvm_runtime
from mlcpipe.devices.support.threads import interruptible
from mlcpipe.errors import UsageError
from mlcpipe.runtime.loading import LoadedBundle
from mlcpipe.runtime.pages import SequencePages
from mlcpipe.runtime.sampler import Row, Sampler

# Of the logits that one call gives where all are wanted: 512 rows of a vocabulary of 128256 would be 262 MB.
_LOGITS_BYTES = 64 << 20


class LoadedModel:
    """A loaded bundle with one sequence in its pages.

    What the pages hold beyond `tokens` is never read, so an error or Ctrl-C half way leaves the tokens before. Who
    calls it from several threads enters `exclusive`.

    `revision` changes whenever the sequence does, so that a caller can tell that others used the pages.
    """

    def __init__(self, bundle: LoadedBundle) -> None:
        self.bundle = bundle
        self.revision = 0
        self._user: dict[str, int] = {}  # "thread": the one inside `exclusive`
        self._device, self._info = bundle.device, bundle.manifest.model
        self._pages = SequencePages(bundle)
        self._sampler, self._recorder = Sampler(bundle), self._device.step_recorder()
        weakref.finalize(self, self._recorder.close)
        self._tokens: list[int] = []
        self._rope = 0  # what `_rope_of` gave for the prompt among them
        self._logits: Any = None

    def release(self) -> None:
        """Give the memory of the pages back; nothing can be computed any more."""
        self._pages.release()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Inside, other threads get UsageError instead of a sequence that two of them change; nobody waits."""
        me = threading.get_ident()
        again = self._user.get("thread") == me
        try:  # no lock: Ctrl-C between its acquisition and this line would leave it locked
            if self._user.setdefault("thread", me) != me:
                raise UsageError(
                    "the engine is in use by another thread", next_step="open an engine for each thread, or take turns"
                )
            yield
        finally:
            if not again and self._user.get("thread") == me:
                del self._user["thread"]

    @property
    def tokens(self) -> Sequence[int]:
        """The tokens whose keys and values the cache holds."""
        return self._tokens

    def reset(self) -> None:
        """Forget the sequence."""
        self.revision += 1
        self._tokens = []

    def rollback(self, count: int) -> None:
        """Forget the last `count` tokens."""
        if count:
            self.revision += 1
            self._tokens = self._tokens[:-count]

    def prefill(self, tokens: Sequence[int], row: Row) -> int:
        """Make `tokens` the sequence, computing only what the cache lacks -> the next token, drawn as `row` says.

        Raises UsageError for ids outside the vocabulary, and when the context is full; ComputeError, which names the
        layer, where the logits are not finite.
        """
        self.check_fits(len(tokens))
        shared = self.reusable(tokens)
        ids = self.token_ids(tokens[shared:])
        self._rope = self._rope_of(len(tokens))
        if shared:
            self.rollback(len(self._tokens) - shared)
            if len(ids) == 1:
                return self._step(int(ids[0]), row)
        else:
            self.reset()
        *chunks, last = _split(ids, self._info.prefill_chunk)
        for chunk in chunks:
            self._append(chunk.tolist(), self._pages.forward_prompt(chunk, len(self._tokens), len(tokens), "none"))
        compute = self._pages.forward_prompt(last, len(self._tokens), len(tokens), "last")
        return self._append_and_sample(last.tolist(), compute, row)

    def step(self, token: int, row: Row) -> int:
        """Append one token of the vocabulary -> the next one. Raises what `prefill` raises."""
        length = len(self._tokens)
        if not length or length == self._info.recompute_above:
            return self.prefill([*self._tokens, token], row)
        self.check_fits(length + 1)
        return self._step(token, row)

    def read_logits(self) -> NDArray[np.float32]:
        """Logits f32[V] of the last token, changed by penalties and bias; valid until the next call."""
        flat: NDArray[np.float32] = self._read(self._logits).reshape(-1)
        return flat

    def all_logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Logits f32[len(tokens), V] after each token of a new sequence, which is forgotten afterwards."""
        self.check_fits(len(tokens))
        ids, vocab = self.token_ids(tokens), self._info.vocab_size
        rows = np.empty((len(ids), vocab), np.float32)
        self.reset()
        try:
            done = 0
            for chunk in _split(ids, min(self._info.prefill_chunk, max(1, _LOGITS_BYTES // (4 * vocab)))):
                logits = self._append(chunk.tolist(), self._pages.forward_prompt(chunk, done, len(ids), "all"))
                rows[done : done + len(chunk)] = self._read(logits)
                done += len(chunk)
                del logits
        finally:
            self.reset()
        tvm_runtime.release_pools()  # which would keep logits of every number of tokens
        return rows

    def reusable(self, tokens: Sequence[int]) -> int:
        """How many tokens at the start of `tokens` the cache holds; never all, as the last one gives the logits."""
        limit = self._info.recompute_above
        if limit is not None and (len(tokens) > limit) != (len(self._tokens) > limit):
            return 0  # RoPE's frequencies are others on the other side of the limit
        if self._rope_of(len(tokens)) != self._rope:
            return 0
        return max(0, min(_common_prefix(self._tokens, list(tokens)), len(tokens) - 1))

    def _rope_of(self, length: int) -> int:
        """The length that dynamic RoPE's frequencies follow in a prompt of so many tokens; 0 where they are fixed."""
        above = self._info.rope_above
        return 0 if above is None else max(length, above)

    def check_fits(self, count: int) -> None:
        """Raises UsageError when the context has no room for `count` tokens."""
        if count > self.bundle.context_length:
            raise UsageError(
                "the context is full",
                expected=f"at most {self.bundle.context_length} tokens, prompt and answer",
                found=count,
                next_step="shorten the prompt, start a new conversation, or load with a larger context",
            )

    def token_ids(self, tokens: Sequence[int]) -> NDArray[np.int32]:
        """Tokens as i32[n]. Raises UsageError unless they are one or more ids of the vocabulary.

        The kernels take rows of the embedding by these numbers and do not check them.
        """
        vocab = self._info.vocab_size
        try:
            ids = np.asarray(tokens)
        except ValueError:  # lists of several lengths
            ids = np.zeros(0)
        if ids.ndim != 1 or ids.dtype.kind not in "iu" or not ids.size or ids.min() < 0 or ids.max() >= vocab:
            raise UsageError("token ids", expected=f"one or more integers from 0 to {vocab - 1}", found=_summary(ids))
        return ids.astype(np.int32)

    def _step(self, token: int, row: Row) -> int:
        compute = self._pages.forward_step(token, len(self._tokens))
        return self._append_and_sample([token], compute, row, decodes=True)

    def _append_and_sample(self, ids: list[int], forward: Callable[[], Any], row: Row, *, decodes: bool = False) -> int:
        """Append tokens -> the next one. Raises ComputeError."""

        def forward_and_sample() -> tuple[Any, Any]:
            logits = forward()
            return logits, self._sampler.sample(logits)

        key = self._sampler.prepare([row], [len(self._tokens) + len(ids)])
        self._logits = None  # its memory may serve the new ones
        self._logits, sampled = self._append(ids, forward_and_sample, key if decodes else None)
        token = int(self._read(sampled)[0])
        if token < 0:
            length, self._tokens = len(self._tokens), []  # nothing to build on
            raise self._pages.compute_error(length)
        row.accept(token)
        return token

    def _append(self, ids: list[int], compute: Callable[[], Any], key: Hashable = None) -> Any:
        """The result of `compute`, which writes the keys and values of these tokens to the pages.

        Without a key, which a decode step has, it may take long: handlers of signals may stop it.
        """
        self.revision += 1
        watch = interruptible(self.bundle.library.module, len(ids)) if key is None else nullcontext()
        with self._device.errors(), watch:
            result = self._recorder.run(compute, key)
        self._tokens += ids
        return result

    def _read(self, tensor: Any) -> NDArray[Any]:
        """The numbers of a tensor of the device, once they are computed, valid until the next call."""
        with self._device.errors():
            return tvm_runtime.array(self._device.read(tensor))


def _split(ids: NDArray[np.int32], size: int) -> list[NDArray[np.int32]]:
    return [ids[begin : begin + size] for begin in range(0, len(ids), size)]


def _common_prefix(one: list[int], other: list[int]) -> int:
    """Number of tokens with which both begin."""
    n = min(len(one), len(other))
    if one[:n] == other[:n]:
        return n
    return next(i for i in range(n) if one[i] != other[i])


def _summary(ids: NDArray[Any]) -> str:
    if not ids.size:
        return "none"
    if ids.dtype.kind not in "iu" or ids.ndim != 1:
        return "something else"
    return f"{ids.size} ids from {ids.min()} to {ids.max()}"
