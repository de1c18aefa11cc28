"""A loaded bundle whose steps its caller runs: logits, saved chats, measurements. Answers come from `AnswerLoop`."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlcpipe.bundle.memory import one_sequence
from mlcpipe.bundle.tasks import check_writes
from mlcpipe.devices.support import tvm_runtime
from mlcpipe.devices.support.threads import interruptible
from mlcpipe.errors import ResourceError, UsageError
from mlcpipe.runtime.chat_file import SavedChat, clear_unused
from mlcpipe.runtime.loading import LoadedBundle
from mlcpipe.runtime.sampler import Row
from mlcpipe.runtime.serving.adapters import Adapter, read_packed
from mlcpipe.runtime.serving.core import Core
from mlcpipe.runtime.serving.cost_model import CostModel
from mlcpipe.runtime.serving.executor import Forward
from mlcpipe.runtime.serving.limits import Limits
from mlcpipe.runtime.serving.sequence import ScheduledRequest, Sequence, State
from mlcpipe.runtime.serving.step import DecodeRows, PrefillRows
from mlcpipe.vision.processors.picture import Picture, whole_pictures

# Of the logits that one call gives where all are wanted: 512 rows of a vocabulary of 128256 would be 262 MB.
_LOGITS_BYTES = 64 << 20
_SEQUENCES = 8  # of one process's own answers at once, each with a row of logits
_QUEUE = 1 << 20


class LoadedModel:
    """A loaded bundle, and a `core` over the units of one conversation of its context.

    The conversation is the sequence that the core parked last. Places beyond its `length` tokens are never read, so an
    error or Ctrl-C during a forward leaves the tokens before. `adapter` is the folder of a LoRA adapter for all
    computations; raises CheckpointError for one that cannot be used. With `drafts` the costs of steps are learned.
    """

    def __init__(self, bundle: LoadedBundle, adapter: Path | None = None, *, drafts: bool = False) -> None:
        self.bundle = bundle
        self._device, self._info = bundle.device, bundle.manifest.model
        check_writes(bundle.manifest)
        packed = None if adapter is None else read_packed(adapter, adapter.name, self._info)
        limits = Limits(
            bundle.context_length, sequences=_SEQUENCES, queue=_QUEUE, decode_rows=_SEQUENCES, step_s=float("inf")
        )
        units = one_sequence(bundle.manifest, bundle.context_length)
        blocks = 0 if packed is None else packed.blocks
        cost = CostModel(learn=drafts)  # which takes 40 us a step
        self.core = Core(bundle, units, limits, cost, blocks, first_rows=1)
        self.adapter: Adapter | None = None
        if packed is not None and self.core.executor.adapters is not None:
            with self._device.errors():
                self.adapter = self.core.executor.adapters.load(packed)
        self._logits: Any = None

    def check_savable(self) -> None:
        """Raises UsageError for a sequence whose keys and values only this engine could continue."""
        if self._info.diffusion is not None:
            raise UsageError("a chat in blocks or answers that are denoised is neither saved nor continued from a file")
        if self.adapter is not None:
            raise UsageError("a chat with an adapter is neither saved nor continued from a file")

    @property
    def _conversation(self) -> Sequence | None:
        parked = self.core.scheduler.admission.parked
        return parked[-1] if parked else None

    @property
    def length(self) -> int:
        """The number of computed tokens of the conversation."""
        sequence = self._conversation
        return 0 if sequence is None else sequence.computed

    @property
    def tokens(self) -> list[int]:
        """The tokens of the conversation whose keys and values the pages hold."""
        sequence = self._conversation
        return [] if sequence is None else sequence.tokens[: sequence.computed]

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt that the conversation started with; it may exceed `length`."""
        sequence = self._conversation
        return 0 if sequence is None or not sequence.computed else sequence.decode_from

    def reset(self) -> None:
        """Forget the conversation, and all earlier ones."""
        self.core.forget()

    def saved_states(self) -> Iterator[NDArray[np.int8]]:
        """Copies int8[n, unit_bytes] of the units of each state of the conversation, unused places 0."""
        sequence = self._conversation
        for index, state in enumerate(self.bundle.manifest.states if sequence is not None else ()):
            assert sequence is not None
            with self._device.errors():
                used = self.core.executor.read_units(index, self.core.executor.ids(index, sequence))
            clear_unused(state, used, sequence.computed)
            yield used

    def restore(self, saved: SavedChat) -> None:
        """Make a checked chat the conversation. After an error of the device there is none."""
        self.reset()
        if not saved.tokens:
            return
        executor, scheduler, end = self.core.executor, self.core.scheduler, len(saved.tokens)
        sequence = self._begun(saved.tokens)
        with self._accounts():
            scheduler.pool.slide(sequence, end)
            self._reserve(sequence, end)
            scheduler.pool.advance(sequence, end)
            sequence.decode_from = saved.prompt_tokens
            for index, units in enumerate(saved.states):
                with self._device.errors():
                    executor.write_units(index, executor.ids(index, sequence), units)
            scheduler.tree.add(sequence)
            scheduler.tree.checkpoint(sequence)
            scheduler.admission.park(sequence)

    def prefill(self, tokens: abc.Sequence[int], row: Row | None) -> int:
        """Make `tokens` the conversation, computing only what the cache lacks -> the next token, sampled by `row`.

        Without a row no token is sampled, and `read_logits` returns what the model computed.
        Raises UsageError for ids outside the vocabulary, and when the context is full; ComputeError, which names the
        layer, where the logits are not finite.
        """
        self._check_next_token()
        self.check_fits(len(tokens))
        ids = self.token_ids(tokens).tolist()
        sequence = self._begun(ids)
        with self._accounts():
            self.core.scheduler.admission.start(sequence)
            self.core.scheduler.admission.park(sequence)
        shared, end = sequence.computed, len(ids)
        cut = self.core.scheduler.tree.checkpoint_before(shared, end)
        *chunks, last = [
            *_split(ids[shared:cut], self._info.prefill_chunk),
            *_split(ids[cut:], self._info.prefill_chunk),
        ]
        for chunk in chunks:
            self._append(sequence, len(chunk), partial(self._prefill, sequence, chunk))
        return self._append_and_sample(sequence, len(last), partial(self._prefill, sequence, last, draws=True), row)

    def step(self, token: int, row: Row | None) -> int:
        """Append one token of the vocabulary to the conversation -> the next one. Raises what `prefill` raises."""
        self._check_next_token()
        sequence = self._conversation
        if sequence is None or not sequence.computed or sequence.computed == self._info.recompute_above:
            return self.prefill([*self.tokens, token], row)
        self.check_fits(sequence.computed + 1)
        return self._step(sequence, token, row)

    def read_logits(self) -> NDArray[np.float32]:
        """Logits f32[V] of the last token, changed by sampling; valid until the next call."""
        flat: NDArray[np.float32] = self._read(self._logits).reshape(-1)
        return flat

    def all_logits(self, tokens: abc.Sequence[int], pictures: abc.Sequence[Picture] = ()) -> NDArray[np.float32]:
        """Logits f32[len(tokens), V] after each token of a new sequence, which is forgotten afterwards.

        Negative tokens are rows of `pictures`, as `mlcpipe.runtime.pictures.with_rows` has them.
        """
        rows, begin = np.empty((len(tokens), self._info.vocab_size), np.float32), 0
        for part in self.logit_parts(tokens, pictures=pictures):
            rows[begin : begin + len(part)] = part
            begin += len(part)
        return rows

    @property
    def max_logit_rows(self) -> int:
        """Rows of logits that one call computes, whole blocks of a model that denoises them."""
        how = self.core.denoising
        if how is not None and not how.keeps:
            return self.core.limits.masked_rows
        most = min(self._info.prefill_chunk, max(1, _LOGITS_BYTES // (4 * self._info.vocab_size)))
        return most if how is None else max(how.block, how.begin(most))

    def logit_parts(
        self,
        tokens: abc.Sequence[int],
        begin: int = 0,
        rows: int | None = None,
        pictures: abc.Sequence[Picture] = (),
    ) -> Iterator[NDArray[np.float32]]:
        """Logits f32[m, V] after each token from `begin` on of a new sequence, which is forgotten afterwards.

        m is `max_logit_rows`, or less: `rows`, or the rest. Each part is valid until the next one.
        """
        self.check_fits(len(tokens))
        how, most = self.core.denoising, min(rows or self.max_logit_rows, self.max_logit_rows)
        if how is not None and not how.keeps and (begin or len(tokens) > most):
            expected = f"at most {most} tokens, and all their logits"
            raise UsageError("a text whose tokens all see each other", expected=expected, found=len(tokens))
        ids = list(tokens) if pictures else self.token_ids(tokens).tolist()
        sequence, pool = self._begun(ids, pictures), self.core.scheduler.pool
        try:
            ahead = self.core.limits.whole_pictures and bool(pictures)
            for chunk in _split(ids[:begin], self._info.prefill_chunk, ahead):
                self._append(sequence, len(chunk), partial(self._prefill, sequence, chunk))
            for chunk in _split(ids[begin:], most, ahead):
                prepare = partial(self._prefill, sequence, chunk, all_rows=True)
                yield self._read(self._append(sequence, len(chunk), prepare))
        finally:
            if pool is self.core.scheduler.pool:
                pool.release(sequence)
            tvm_runtime.release_pools()  # they would keep logits of every number of tokens

    def _check_next_token(self) -> None:
        """Raises UsageError for a model without one."""
        if self._info.diffusion is not None:
            raise UsageError(
                f"the model denoises {self._info.diffusion.denoises}, and has no next token",
                next_step="use Engine.chat or Engine.generate",
            )

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

    def _begun(self, tokens: list[int], pictures: abc.Sequence[Picture] = ()) -> Sequence:
        """A new sequence with this prompt, which the scheduler does not know."""
        request = ScheduledRequest(
            tuple(tokens), 1, adapter=self.adapter, redraws=True, parks=True,
            pictures={one.number: one for one in pictures}, denoising=self.core.denoising,
        )  # fmt: skip
        sequence = self.core.scheduler.pool.sequence(-1, request)
        sequence.state = State.ENDED
        return sequence

    def _prefill(self, sequence: Sequence, chunk: list[int], *, draws: bool = False, all_rows: bool = False) -> Forward:
        """The forward of the next tokens of the prompt."""
        rows = PrefillRows(sequence, sequence.computed, len(chunk), (sequence,) * draws)
        return self.core.executor.prefill([rows], all_rows=all_rows)

    def _step(self, sequence: Sequence, token: int, row: Row | None) -> int:
        sequence.tokens[sequence.computed :] = [token]
        decode = self.core.executor.decode
        return self._append_and_sample(sequence, 1, lambda: decode([DecodeRows(sequence, [token], 1)]), row)

    def _append_and_sample(
        self, sequence: Sequence, count: int, prepare: Callable[[], Forward], row: Row | None
    ) -> int:
        """Append `count` tokens -> the next one, -1 without a row. Raises ComputeError."""
        if row is None:
            self._logits = self._append(sequence, count, prepare)
            return -1
        sampler = self.core.sampler

        def and_sample(forward: Forward) -> Forward:
            def launch() -> tuple[Any, Any]:
                logits = forward.launch()
                return logits, sampler.sample(logits)

            return Forward(launch, forward.key and (forward.key, key))

        key = sampler.prepare([row], [sequence.computed + count])
        self._logits, sampled = self._append(sequence, count, lambda: and_sample(prepare()))
        token = int(self._read(sampled)[0])
        if token < 0:
            sequence.tokens = sequence.tokens[: sequence.computed]
            error = self.core.not_finite(sequence)
            self.core.reset()  # its states cannot be used
            raise error
        row.accept(token)
        return token

    def _append(self, sequence: Sequence, count: int, prepare: Callable[[], Forward]) -> Any:
        """The result of a forward, which adds the next `count` tokens to the states.

        A forward without a key is no decode step and may take long: signal handlers may stop it.
        """
        executor, scheduler = self.core.executor, self.core.scheduler
        with self._accounts(), self._device.errors():
            reserved = self._reserve(sequence, count)
            executor.copy_pages(scheduler.pool.take_copies())
        if not reserved:
            raise ResourceError(
                "the KV cache has no room beside the answers in progress", expected=f"pages for {count} more tokens",
                next_step="end them first, or load with a larger context",
            )  # fmt: skip
        forward = prepare()
        watch = interruptible(self.bundle.library.module, count) if forward.key is None else nullcontext()
        with self._device.errors(), watch:
            result = self.core.recorder.run(forward.launch, forward.key)
        with self._accounts():
            scheduler.pool.advance(sequence, count)
            if sequence is self._conversation:
                scheduler.tree.add(sequence)
                scheduler.tree.checkpoint(sequence)
            scheduler.pool.slide(sequence)
        return result

    def _reserve(self, sequence: Sequence, count: int) -> bool:
        """Reserve pages for `count` more tokens; parked sequences give theirs up for it."""
        scheduler = self.core.scheduler
        while not scheduler.tree.reserve(sequence, count):
            if not scheduler.admission.unpark(but=sequence):
                return False
        return True

    @contextmanager
    def _accounts(self) -> Iterator[None]:
        """Inside, an error or Ctrl-C may leave accounts of pages that do not add up: all sequences are forgotten."""
        try:
            yield
        except BaseException:
            self.core.reset()
            raise

    def _read(self, tensor: Any) -> NDArray[Any]:
        """The numbers of a tensor of the device, valid until the next call; waits until they are computed."""
        with self._device.errors():
            return tvm_runtime.array(self._device.read(tensor))


def _split(ids: list[int], size: int, ahead: bool = False) -> list[list[int]]:
    """Parts of up to `size` ids; with `ahead` no picture is cut. Raises UsageError for one of more rows."""
    if not ahead:
        return [ids[begin : begin + size] for begin in range(0, len(ids), size)]
    parts, begin = [], 0
    while begin < len(ids):
        end = whole_pictures(ids, begin, min(begin + size, len(ids)), begin + size)
        if end == begin:
            raise UsageError("logits of a picture's rows", expected=f"at most {size} at once", found="more")
        parts.append(ids[begin:end])
        begin = end
    return parts


def _summary(ids: NDArray[Any]) -> str:
    if not ids.size:
        return "none"
    if ids.dtype.kind not in "iu" or ids.ndim != 1:
        return "something else"
    return f"{ids.size} ids from {ids.min()} to {ids.max()}"
