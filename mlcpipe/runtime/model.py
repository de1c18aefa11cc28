"""A loaded bundle with one sequence in its states: its computed tokens, and the steps that add to them."""

from __future__ import annotations

import threading
import weakref
from collections import abc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlcpipe.bundle.memory import one_sequence
from mlcpipe.devices.support import tvm_runtime
from mlcpipe.devices.support.threads import interruptible
from mlcpipe.errors import UsageError
from mlcpipe.runtime.chat_file import SavedChat, clear_unused
from mlcpipe.runtime.loading import LoadedBundle
from mlcpipe.runtime.not_finite import compute_error, of_states
from mlcpipe.runtime.sampler import Row, Sampler
from mlcpipe.runtime.serving.adapters import read_packed
from mlcpipe.runtime.serving.core import pool_of
from mlcpipe.runtime.serving.executor import Executor, Forward
from mlcpipe.runtime.serving.prefix_tree import PrefixTree
from mlcpipe.runtime.serving.sequence import ScheduledRequest, Sequence
from mlcpipe.runtime.serving.step import DecodeRows, PrefillRows
from tir_schedules.step_layout import PAGE

# Of the logits that one call gives where all are wanted: 512 rows of a vocabulary of 128256 would be 262 MB.
_LOGITS_BYTES = 64 << 20


class LoadedModel:
    """A loaded bundle with one sequence in its states.

    Places beyond `length` tokens are never read, so an error or Ctrl-C during a forward leaves the tokens before.
    Callers on several threads enter `exclusive`.

    `revision` changes whenever the sequence does, so that a caller can tell that another one used it. `adapter` is the
    folder of a LoRA adapter for all computations; raises CheckpointError for one that cannot be used.
    """

    def __init__(self, bundle: LoadedBundle, adapter: Path | None = None) -> None:
        self.bundle = bundle
        self.revision = 0
        self._user: dict[str, int] = {}  # "thread": the one inside `exclusive`
        self._device, self._info = bundle.device, bundle.manifest.model
        if self._info.embedding is not None:
            raise UsageError(
                "the model embeds texts and writes none", next_step="use mlcpipe embed or mlcpipe.Embedder"
            )
        units = one_sequence(bundle.manifest, bundle.context_length)
        packed = None if adapter is None else read_packed(adapter, adapter.name, self._info)
        blocks = 0 if packed is None else packed.blocks
        self._executor = Executor(bundle, units, decode_rows=1, adapter_blocks=blocks)
        loaded = None
        if packed is not None and self._executor.adapters is not None:
            with self._device.errors():
                loaded = self._executor.adapters.load(packed)
        self._units, self._adapter = units, loaded
        self.reset()
        self._sampler, self._recorder = Sampler(bundle), self._device.step_recorder()
        weakref.finalize(self, self._recorder.close)
        self._logits: Any = None

    def release(self) -> None:
        """Free the memory of the states; nothing can be computed afterwards."""
        self._executor.release()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Inside, calls from other threads raise UsageError at once, so that no two threads change the sequence."""
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

    def check_savable(self) -> None:
        """Raises UsageError for a sequence whose keys and values only an adapter's own engine could continue."""
        if self._sequence.request.adapter is not None:
            raise UsageError("a chat with an adapter is neither saved nor continued from a file")

    @property
    def length(self) -> int:
        """The number of computed tokens."""
        return self._sequence.computed

    @property
    def tokens(self) -> list[int]:
        """The tokens whose keys and values the pages hold."""
        return self._sequence.tokens[: self.length]

    def reset(self) -> None:
        """Forget the sequence, and all earlier ones."""
        self.revision += 1
        self._pool = pool_of(self.bundle.manifest, self._units)
        self._tree = PrefixTree(self._pool, self._info.recompute_above, self._info.rope_above)
        self._sequence = self._begun([0])

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt that the sequence started with; it may exceed `length`."""
        return self._sequence.decode_from if self.length else 0

    def saved_states(self) -> Iterator[NDArray[np.int8]]:
        """Copies int8[n, unit_bytes] of the units of each state that the sequence continues from, unused places 0."""
        for index, state in enumerate(self.bundle.manifest.states if self.length else ()):
            with self._device.errors():
                used = self._executor.read_units(index, self._executor.ids(index, self._sequence))
            clear_unused(state, used, self.length)
            yield used

    def restore(self, saved: SavedChat) -> None:
        """Make a checked chat the sequence. After an error of the device the sequence is empty."""
        self.reset()
        if not saved.tokens:
            return
        end = len(saved.tokens)
        self._sequence = sequence = self._begun(saved.tokens)
        self._pool.slide(sequence, end)
        self._tree.reserve(sequence, end)
        self._pool.advance(sequence, end)
        sequence.decode_from = saved.prompt_tokens
        try:
            for index, units in enumerate(saved.states):
                with self._device.errors():
                    self._executor.write_units(index, self._executor.ids(index, sequence), units)
        except BaseException:
            self.reset()
            raise
        self._tree.add(sequence)
        self._tree.checkpoint(sequence)

    def prefill(self, tokens: abc.Sequence[int], row: Row | None, dropped: int = 0) -> int:
        """Make `tokens` the sequence, computing only what the cache lacks -> the next token, sampled by `row`.

        Without a row no token is sampled, and `read_logits` returns what the model computed.
        `dropped` tokens are left out of a shifted context, and count in the positions of random numbers.
        Raises UsageError for ids outside the vocabulary, and when the context is full; ComputeError, which names the
        layer, where the logits are not finite.
        """
        self.check_fits(len(tokens))
        ids = self.token_ids(tokens).tolist()
        self.revision += 1
        with self._accounts():
            self._sequence, previous = self._begun(ids), self._sequence
            self._sequence.dropped = dropped
            self._continue(previous)
        shared, end = self.length, len(ids)
        if shared and end - shared == 1:
            return self._step(ids[-1], row)
        cut = self._tree.checkpoint_before(shared, end)
        *chunks, last = [
            *_split(ids[shared:cut], self._info.prefill_chunk),
            *_split(ids[cut:], self._info.prefill_chunk),
        ]
        for chunk in chunks:
            self._append(len(chunk), partial(self._prefill, chunk))
        return self._append_and_sample(len(last), partial(self._prefill, last, draws=True), row)

    def step(self, token: int, row: Row | None) -> int:
        """Append one token of the vocabulary -> the next one. Raises what `prefill` raises."""
        if not self.length or self.length == self._info.recompute_above:
            return self.prefill([*self.tokens, token], row, self._sequence.dropped)
        self.check_fits(self.length + 1)
        return self._step(token, row)

    def read_logits(self) -> NDArray[np.float32]:
        """Logits f32[V] of the last token, changed by sampling; valid until the next call."""
        flat: NDArray[np.float32] = self._read(self._logits).reshape(-1)
        return flat

    def all_logits(self, tokens: abc.Sequence[int]) -> NDArray[np.float32]:
        """Logits f32[len(tokens), V] after each token of a new sequence, which is forgotten afterwards."""
        rows, begin = np.empty((len(tokens), self._info.vocab_size), np.float32), 0
        for part in self.logit_parts(tokens):
            rows[begin : begin + len(part)] = part
            begin += len(part)
        return rows

    @property
    def max_logit_rows(self) -> int:
        """Rows of logits that one call computes."""
        return min(self._info.prefill_chunk, max(1, _LOGITS_BYTES // (4 * self._info.vocab_size)))

    def logit_parts(
        self, tokens: abc.Sequence[int], begin: int = 0, rows: int | None = None
    ) -> Iterator[NDArray[np.float32]]:
        """Logits f32[m, V] after each token from `begin` on of a new sequence, which is forgotten afterwards.

        m is `max_logit_rows`, or less: `rows`, or the rest. Each part is valid until the next one.
        """
        self.check_fits(len(tokens))
        ids = self.token_ids(tokens).tolist()
        self.reset()
        self._sequence = self._begun(ids)
        try:
            for chunk in _split(ids[:begin], self._info.prefill_chunk):
                self._append(len(chunk), partial(self._prefill, chunk))
            for chunk in _split(ids[begin:], min(rows or self.max_logit_rows, self.max_logit_rows)):
                yield self._read(self._append(len(chunk), partial(self._prefill, chunk, all_rows=True)))
        finally:
            self.reset()
            tvm_runtime.release_pools()  # they would keep logits of every number of tokens

    def reusable(self, tokens: abc.Sequence[int]) -> int:
        """How many tokens at the start of `tokens` are cached; never all, as the last one gives the logits."""
        sequence = self._begun(list(tokens))
        own = self._shared_with(self._sequence, sequence)
        return max(own, len(self._tree.match(sequence)) * PAGE)

    def _shared_with(self, previous: Sequence, sequence: Sequence) -> int:
        """Number of tokens that a sequence could take over from the previous one."""
        if self._tree.family(previous) != self._tree.family(sequence):
            return 0
        most = min(previous.computed, len(sequence.tokens) - 1)
        shared = _common_prefix(previous.tokens[:most], sequence.tokens[:most])
        return shared if self._tree.can_go_back(previous, shared) else 0

    def _continue(self, previous: Sequence) -> None:
        """Start with the tokens of the previous sequence, or with pages that are found."""
        sequence = self._sequence
        shared = self._shared_with(previous, sequence)
        if shared < len(self._tree.match(sequence)) * PAGE or not shared:
            self._pool.release(previous)
            self._tree.take(sequence)
            return
        self._tree.go_back(previous, shared)
        self._pool.fork(previous, sequence)
        self._pool.release(previous)

    def check_fits(self, count: int) -> None:
        """Raises UsageError when the context has no room for `count` tokens."""
        if count > self.bundle.context_length:
            raise UsageError(
                "the context is full",
                expected=f"at most {self.bundle.context_length} tokens, prompt and answer",
                found=count,
                next_step="shorten the prompt, start a new conversation, or load with a larger context",
            )

    def token_ids(self, tokens: abc.Sequence[int]) -> NDArray[np.int32]:
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

    def _begun(self, tokens: list[int]) -> Sequence:
        """A new sequence with this prompt."""
        return self._pool.sequence(0, ScheduledRequest(tuple(tokens), 1, adapter=self._adapter, redraws=True))

    def _prefill(self, chunk: list[int], *, draws: bool = False, all_rows: bool = False) -> Forward:
        """The forward of the next tokens of the prompt."""
        rows = PrefillRows(self._sequence, self.length, len(chunk), (self._sequence,) * draws)
        return self._executor.prefill([rows], all_rows=all_rows)

    def _step(self, token: int, row: Row | None) -> int:
        self._sequence.tokens[self.length :] = [token]
        return self._append_and_sample(1, lambda: self._executor.decode([DecodeRows(self._sequence, [token], 1)]), row)

    def _append_and_sample(self, count: int, prepare: Callable[[], Forward], row: Row | None) -> int:
        """Append `count` tokens -> the next one, -1 without a row. Raises ComputeError."""
        if row is None:
            self._logits = self._append(count, prepare)
            return -1

        def and_sample(forward: Forward) -> Forward:
            def launch() -> tuple[Any, Any]:
                logits = forward.launch()
                return logits, self._sampler.sample(logits)

            return Forward(launch, forward.key and (forward.key, key))

        key = self._sampler.prepare([row], [self._sequence.dropped + self.length + count])
        self._logits, sampled = self._append(count, lambda: and_sample(prepare()))
        token = int(self._read(sampled)[0])
        if token < 0:
            states, self._sequence.tokens = self.bundle.manifest.states, self.tokens
            error = compute_error(self.bundle, lambda: of_states(states, self._executor, self._sequence))
            self.reset()  # its states cannot be used
            raise error
        row.accept(token)
        return token

    def _append(self, count: int, prepare: Callable[[], Forward]) -> Any:
        """The result of a forward, which adds the next `count` tokens to the states.

        A forward without a key is no decode step and may take long: signal handlers may stop it.
        """
        self.revision += 1
        sequence = self._sequence
        with self._accounts(), self._device.errors():
            if not self._tree.reserve(sequence, count):
                raise AssertionError("there are pages for the whole context")
            self._executor.copy_pages(self._pool.take_copies())
        forward = prepare()
        watch = interruptible(self.bundle.library.module, count) if forward.key is None else nullcontext()
        with self._device.errors(), watch:
            result = self._recorder.run(forward.launch, forward.key)
        with self._accounts():
            self._pool.advance(sequence, count)
            if sequence.computed // PAGE > sequence.shared:
                self._tree.add(sequence)
                self._tree.checkpoint(sequence)
            self._pool.slide(sequence)
        return result

    @contextmanager
    def _accounts(self) -> Iterator[None]:
        """Inside, an error or Ctrl-C may leave accounts of pages that do not add up: all sequences are forgotten."""
        try:
            yield
        except BaseException:
            self.reset()
            raise

    def _read(self, tensor: Any) -> NDArray[Any]:
        """The numbers of a tensor of the device, valid until the next call; waits until they are computed."""
        with self._device.errors():
            return tvm_runtime.array(self._device.read(tensor))


def _split(ids: list[int], size: int) -> list[list[int]]:
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
