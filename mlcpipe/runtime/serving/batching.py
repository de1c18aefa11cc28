"""Answers many requests together: a thread that plans a step, computes it and delivers its tokens, in a loop."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from collections import Counter, abc, deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mlcpipe.bundle.states import slot_bytes
from mlcpipe.errors import ComputeError, MlcpipeError, UsageError, last_line, no_memory
from mlcpipe.runtime.chat_file import SavedChat
from mlcpipe.runtime.loading import LoadedBundle
from mlcpipe.runtime.sampler import Row, log_probabilities
from mlcpipe.runtime.serving.adapters import Adapter, PackedAdapter, read_packed
from mlcpipe.runtime.serving.context_shift import check_shiftable, tokens_to_drop, without_dropped
from mlcpipe.runtime.serving.core import Core, Drawn
from mlcpipe.runtime.serving.draft_heads import DraftHeads
from mlcpipe.runtime.serving.draft_model import DraftModel, DraftSource, ModelDrafter
from mlcpipe.runtime.serving.drafting import Drafter, Lookup
from mlcpipe.runtime.serving.eagle import EagleDraft
from mlcpipe.runtime.serving.interface import (
    EngineStats,
    FinishReason,
    OverloadedError,
    Request,
    Stream,
    TokenEvent,
    Wake,
    check_request,
)
from mlcpipe.runtime.serving.limits import Limits
from mlcpipe.runtime.serving.prefix_pages import copy_prefix, restore_prefix
from mlcpipe.runtime.serving.sequence import Finish, ScheduledRequest, Sequence
from mlcpipe.runtime.serving.step import Event, Step

_REASONS: dict[Finish, FinishReason] = {
    Finish.STOP: "stop",
    Finish.LENGTH: "length",
    Finish.CANCELLED: "cancelled",
    Finish.TIMEOUT: "timeout",
    Finish.ERROR: "error",
}
_IDLE_S = 0.05  # until the next plan, if no sequence can continue
_HELD_S = 0.002  # the same, if a mask is awaited


@dataclass(eq=False)
class _Answer:
    """A request in progress: its stream, and how its tokens are sampled."""

    stream: Stream
    row: Row
    came_s: float
    sequence: Sequence | None = None
    dropped: int = 0  # tokens of the prompt
    queued_s: float = 0.0
    cached_tokens: int = 0
    logprobs: deque[tuple[float | None, tuple[tuple[int, float], ...]]] = field(default_factory=deque)  # of new tokens
    lookup: Lookup | None = None
    drafter: Drafter | None = None


class Batching:
    """A `ServingEngine` that computes all requests together, over a KV cache of `kv_tokens` tokens.

    `max_queue` requests may wait; another gets OverloadedError. `step_s` is how long a step may take while answers wait
    for their next token. An answer does not depend on the requests beside it, nor on `drafts`: whether tokens that are
    looked up in its texts are checked several at a time, where that is faster; `draft_model`, or else the draft head of
    the bundle, proposes them where the texts do not. `adapter_blocks` is the room for adapters, in blocks of 16 ranks.
    With `context_shift` prompts and answers may be longer than the context, which then holds their first page and their
    last tokens; raises UsageError if the context is too short for that. `swap_bytes` as in `Core`.
    """

    def __init__(
        self,
        bundle: LoadedBundle,
        *,
        kv_tokens: int,
        max_queue: int = 256,
        max_sequences: int | None = None,
        step_s: float = 0.1,
        drafts: bool = True,
        draft_model: LoadedBundle | None = None,
        adapter_blocks: int = 0,
        context_shift: bool = False,
        swap_bytes: int = 0,
    ) -> None:
        if context_shift:
            check_shiftable(min(bundle.context_length, kv_tokens))
        self._context_shift = context_shift
        max_sequences = max_sequences or bundle.manifest.model.max_batch
        limits = Limits(bundle.context_length, sequences=max_sequences, queue=max_queue, step_s=step_s)
        self._drafts = drafts = drafts and not slot_bytes(bundle.manifest.states)  # such states cannot go back
        self._core = Core(bundle, kv_tokens, limits, adapter_blocks=adapter_blocks, swap_bytes=swap_bytes)
        self._draft_model: DraftSource | None = None
        if draft_model is not None:
            self._draft_model = DraftModel(draft_model, kv_tokens, max_sequences)
        elif drafts and bundle.manifest.model.draft_heads:
            self._draft_model = DraftHeads(self._core)
        elif drafts and bundle.manifest.model.eagle is not None:
            self._draft_model = EagleDraft(self._core, kv_tokens)
        self._scheduler = self._core.scheduler
        self._limits, self._kv_tokens = self._scheduler.limits, kv_tokens
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.together = threading.Lock()
        self._numbers = itertools.count(1)
        self._answers: dict[int, _Answer] = {}  # by stream, all that have not ended
        self._of_sequence: dict[int, _Answer] = {}
        self._news: dict[Wake, dict[Stream, None]] = {}  # streams with events, by whom to wake
        self._closing, self._door = threading.Event(), threading.Lock()  # no request is accepted while closing
        self._jobs: deque[tuple[Generator[None, None, Any], Future[Any]]] = deque()  # run in parts between steps
        self._stopped, self._fault = False, ""
        self._finished: Counter[str] = Counter()
        self._step_s: dict[str, float] = {"prefill": 0.0, "decode": 0.0}
        self._thread = threading.Thread(target=self._run, name="mlcpipe-engine", daemon=True)
        self._thread.start()

    @property
    def context_length(self) -> int:
        """Most tokens of a prompt and its answer together."""
        return self._limits.context

    @property
    def context_shift(self) -> bool:
        """As `ServingEngine.context_shift`."""
        return self._context_shift

    @property
    def kv_tokens(self) -> int:
        """As `ServingEngine.kv_tokens`."""
        return self._kv_tokens

    @property
    def vocab_size(self) -> int:
        """Number of logits."""
        return self._core.bundle.manifest.model.vocab_size

    @property
    def fault(self) -> str:
        """As `ServingEngine.fault`."""
        return self._fault

    def check_queue(self) -> None:
        """As `ServingEngine.check_queue`."""
        waiting = len(self._scheduler.admission.waiting) + self._commands.qsize()
        if waiting >= self._limits.queue:
            raise OverloadedError(f"{waiting} requests are waiting already", self._scheduler.retry_after_s())

    def submit(self, request: Request, wake: Wake | None = None) -> Stream:
        """As `ServingEngine.submit`."""
        check_request(request, self.context_length, self.vocab_size, shifts=self.context_shift)
        self.check_queue()
        stream = Stream(next(self._numbers), request, wake)
        matcher = None if request.grammar is None else request.grammar.matcher()
        row = Row(request.sampling, request.tokens, matcher)
        answer = _Answer(stream, row, time.monotonic())
        if self._drafts:
            answer.lookup = lookup = Lookup(request.prediction or (), row.allowed, request.stop_ids)
            answer.drafter = lookup if self._draft_model is None else ModelDrafter(self._draft_model, lookup, row)
        with self._door:
            if self._closing.is_set():
                raise OverloadedError(self._fault or "the server is shutting down", 5.0)
            self._commands.put(partial(self._begin, answer))
        return stream

    def cancel(self, number: int, reason: Literal["cancelled", "stop"] = "cancelled") -> None:
        """As `ServingEngine.cancel`."""
        self._commands.put(partial(self._cancel, number, Finish(reason)))

    def copy_prefix(self, tokens: abc.Sequence[int], namespace: str = "") -> Future[tuple[int, list[NDArray[np.int8]]]]:
        """As `ServingEngine.copy_prefix`."""
        return self._between_steps(copy_prefix(self._core, tokens, namespace))

    def restore_prefix(self, saved: SavedChat, namespace: str = "") -> Future[None]:
        """As `ServingEngine.restore_prefix`."""
        return self._between_steps(restore_prefix(self._core, saved, namespace))

    def check_adapters(self) -> None:
        """As `ServingEngine.check_adapters`."""
        if self._core.executor.adapters is None:
            raise UsageError("the engine takes no adapters", next_step="start it with room for them: --adapter-ranks")

    def read_adapter(self, folder: Path, name: str) -> PackedAdapter:
        """As `ServingEngine.read_adapter`."""
        return read_packed(folder, name, self._core.bundle.manifest.model)

    def load_adapter(self, packed: PackedAdapter) -> Future[Adapter]:
        """As `ServingEngine.load_adapter`."""
        return self._between_steps(self._loading(packed))

    def _loading(self, packed: PackedAdapter) -> Generator[None, None, Adapter]:
        assert self._core.executor.adapters is not None
        with self._core.bundle.device.errors():
            return self._core.executor.adapters.load(packed)
        yield

    def unload_adapter(self, adapter: Adapter) -> None:
        """As `ServingEngine.unload_adapter`."""
        adapter.unloaded = True
        self._commands.put(partial(self._release, adapter))

    def _release(self, adapter: Adapter) -> None:
        """Free the room of an unloaded adapter, unless a request uses it."""
        if not adapter.users and adapter.unloaded and self._core.executor.adapters is not None:
            self._core.executor.adapters.release(adapter)

    def _between_steps(self, job: Generator[None, None, Any]) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # it cannot be cancelled
        with self._door:
            if self._closing.is_set():
                raise OverloadedError(self._fault or "the server is shutting down", 5.0)
            self._commands.put(lambda: self._jobs.append((job, future)))
        return future

    def stats(self) -> EngineStats:
        """As `ServingEngine.stats`."""
        scheduler, swap = self._scheduler, self._scheduler.admission.swap
        counts = scheduler.pool.counts()
        counts = counts[: len(scheduler.pool.groups)]
        pages = sum(sum(each) for each in counts)
        return EngineStats(
            running=len(scheduler.admission.running) + len(scheduler.admission.prefilling),
            waiting=len(scheduler.admission.waiting) + self._commands.qsize(),
            kv_usage=sum(each.used for each in counts) / pages,
            prompt=scheduler.totals.prefix_queries,
            cached=scheduler.totals.prefix_hits,
            generated=scheduler.totals.answer_tokens,
            preemptions=scheduler.totals.preemptions,
            swapped_out=0 if swap is None else swap.tokens_out,
            swapped_in=0 if swap is None else swap.tokens_in,
            swap_bytes=0 if swap is None else swap.bytes,
            drafts=scheduler.totals.drafts,
            drafted=scheduler.totals.drafted,
            accepted=scheduler.totals.accepted,
            finished=dict(self._finished),
            step_s=dict(self._step_s),
        )

    def close(self, drain_s: float = 0.0) -> None:
        """As `ServingEngine.close`."""
        with self._door:
            self._closing.set()
        self._commands.put(lambda: None)  # wakes the thread, which ends once it is idle
        self._thread.join(drain_s)
        self._commands.put(self._stop)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._loop()
        except BaseException as error:
            self._fault = f"the engine failed: {last_line(error)}"
            with self._door:
                self._closing.set()
            with contextlib.suppress(Exception):
                self._take_commands()
            for answer in list(self._answers.values()):
                self._end(answer, "error", ComputeError("the engine failed", found=last_line(error)))
            raise
        finally:
            self._wake()
            for job, future in self._jobs:
                job.close()
                future.set_exception(OverloadedError(self._fault or "the server is shutting down", 5.0))

    def _loop(self) -> None:
        while not self._stopped:
            if not (self._scheduler.has_work or self._jobs or self._closing.is_set()):
                self._wake()
                self._commands.get()()
            self._take_commands()
            self._work()
            if self._draft_model is not None:
                self._draft_model.propose(self._scheduler)
            now = time.monotonic()
            self._deliver(self._scheduler.expire(now))
            step = self._scheduler.plan(now)
            if step is None:
                if self._jobs:
                    continue
                if self._scheduler.has_work:  # wait for a change, or a deadline
                    self._wake()
                    with contextlib.suppress(queue.Empty):
                        self._commands.get(timeout=_HELD_S if self._scheduler.held else _IDLE_S)()
                elif self._closing.is_set() and self._commands.empty():
                    return
                continue
            try:
                self._compute(step)
            except MlcpipeError as error:
                self._fail(step, error)
            except Exception as error:
                self._fail(step, no_memory(error) or ComputeError("the engine failed", found=last_line(error)))

    def _take_commands(self) -> None:
        with self.together:
            while not self._commands.empty():
                self._commands.get()()

    def _work(self) -> None:
        """Run the next part of the first job."""
        if not self._jobs:
            return
        job, future = self._jobs[0]
        try:
            next(job)
            return
        except StopIteration as done:
            future.set_result(done.value)
        except Exception as error:
            future.set_exception(error)
        self._jobs.popleft()

    def _begin(self, answer: _Answer) -> None:
        request = answer.stream.request
        self._answers[answer.stream.id] = answer
        adapter = request.adapter
        answer.dropped = tokens_to_drop(len(request.tokens), self.context_length)
        try:
            if adapter is not None and adapter.unloaded:
                raise UsageError(f"the adapter {adapter.name} was unloaded")
            answer.sequence = self._scheduler.submit(
                ScheduledRequest(
                    tuple(without_dropped(request.tokens, answer.dropped)),
                    request.max_tokens,
                    stop_ids=request.stop_ids,
                    priority=max(-1, min(1, -request.priority)),
                    deadline_s=request.deadline_s,
                    namespace=request.namespace,
                    deterministic=request.deterministic,
                    params=answer.row,
                    drafter=answer.drafter,
                    adapter=adapter,
                    arrival=answer.came_s,
                    shifts=self.context_shift,
                    ready=answer.row.ready,
                    redraws=answer.row.matcher is not None,
                )
            )
        except MlcpipeError as error:
            self._end(answer, "error", error)
            return
        if adapter is not None:
            adapter.users += 1
        self._of_sequence[answer.sequence.id] = answer

    def _cancel(self, number: int, finish: Finish = Finish.CANCELLED) -> None:
        if (answer := self._answers.get(number)) is not None and answer.sequence is not None:
            event = self._scheduler.cancel(answer.sequence, finish)
            self._deliver([event] if event is not None else [])

    def _stop(self) -> None:
        for number in list(self._answers):
            self._cancel(number)
        self._stopped = True

    def _compute(self, step: Step) -> None:
        """Compute a step, and deliver its tokens."""
        for rows in step.prefill:
            for one in (rows.sequence, *rows.drawing):
                answer = self._of_sequence.get(one.id)
                if answer is not None and not answer.queued_s:
                    answer.queued_s = step.planned - answer.came_s
        tokens = self._core.compute(step, self._take, self._wake)
        now = time.monotonic()
        self._step_s["prefill" if step.prefill else "decode"] += now - step.planned
        self._deliver(self._scheduler.settle(step, tokens, now))

    def _take(self, drawn: Drawn) -> None:
        """Add a token to its answer, which ends here if that fails."""
        sequence, token, settings, logits = drawn
        answer = self._of_sequence.get(sequence.id)
        if answer is None:
            return
        try:
            if token < 0:
                raise self._core.not_finite(sequence)
            if settings.mask_error is not None:
                raise settings.mask_error
            answer.row.accept(token)
            request = answer.stream.request
            if request.logprobs is not None:
                logprob, top = log_probabilities(logits(), token, request.sampling, request.logprobs)
                answer.logprobs.append((logprob, tuple(top)))
        except MlcpipeError as error:
            wrong = isinstance(error, ComputeError)  # after a grammar's error keys and values are right
            self._scheduler.cancel(sequence, Finish.ERROR if wrong else Finish.CANCELLED)
            self._end(answer, "error", error)

    def _deliver(self, events: Iterable[Event]) -> None:
        """Pass events to the streams of their answers."""
        for sequence, tokens, finish in events:
            answer = self._of_sequence.get(sequence.id)
            if answer is None:
                continue
            reason = None if finish is None else _REASONS[finish]
            if reason is None and answer.row.matcher is not None and answer.row.matcher.ended:
                self._scheduler.cancel(sequence, Finish.STOP)
                reason = "stop"
            answer.cached_tokens = sequence.cached or 0
            for token in tokens[: len(tokens) - (reason is not None)]:
                self._tell(answer, token)
            if reason is not None:
                self._end(answer, reason, token=tokens[-1] if tokens else None)

    def _end(
        self, answer: _Answer, reason: FinishReason, error: MlcpipeError | None = None, token: int | None = None
    ) -> None:
        self._answers.pop(answer.stream.id, None)
        if answer.sequence is not None and self._of_sequence.pop(answer.sequence.id, None) is not None:
            adapter = answer.stream.request.adapter
            if adapter is not None:
                adapter.users -= 1
                self._release(adapter)
        self._finished[reason] += 1
        self._tell(answer, token, reason, error)

    def _tell(
        self,
        answer: _Answer,
        token: int | None,
        reason: FinishReason | None = None,
        error: MlcpipeError | None = None,
    ) -> None:
        """Put a token, or the end, in the stream; `_wake` announces it."""
        logprob, top = answer.logprobs.popleft() if token is not None and answer.logprobs else (None, ())
        stream, predicted, dropped = answer.stream, (0, 0), answer.dropped
        if reason is not None and answer.lookup is not None:
            predicted = answer.lookup.predicted
        if answer.sequence is not None:
            dropped += answer.sequence.dropped
        stream.put(
            TokenEvent(token, reason, logprob, top, answer.cached_tokens, answer.queued_s, error, predicted, dropped)
        )
        if stream.wake is not None:
            self._news.setdefault(stream.wake, {})[stream] = None

    def _wake(self) -> None:
        """Wake the consumers of new events; before this thread waits, so that they read while it needs no processor."""
        news, self._news = self._news, {}
        for wake, streams in news.items():
            wake(list(streams))

    def _fail(self, step: Step, error: MlcpipeError) -> None:
        """End all requests of a step that could not be computed."""
        for sequence in (*(one.sequence for one in step.decode), *(one.sequence for one in step.prefill)):
            answer = self._of_sequence.get(sequence.id)
            self._scheduler.cancel(sequence, Finish.ERROR)
            if answer is not None:
                self._end(answer, "error", error)
