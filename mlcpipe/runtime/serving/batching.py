"""Answers many requests together: a thread that runs the loop of answers, commands and jobs between its steps."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import abc, deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mlcpipe.bundle.memory import many_sequences
from mlcpipe.errors import ComputeError, UsageError, last_line
from mlcpipe.runtime.chat_file import SavedChat
from mlcpipe.runtime.loading import LoadedBundle
from mlcpipe.runtime.serving.adapters import Adapter, PackedAdapter, read_packed
from mlcpipe.runtime.serving.answer_loop import AnswerLoop
from mlcpipe.runtime.serving.context_shift import check_shiftable
from mlcpipe.runtime.serving.core import Core
from mlcpipe.runtime.serving.denoised import check_options
from mlcpipe.runtime.serving.interface import EngineStats, OverloadedError, Request, Stream, Wake, check_request
from mlcpipe.runtime.serving.limits import Limits
from mlcpipe.runtime.serving.open_drafts import draft_source
from mlcpipe.runtime.serving.prefix_pages import copy_prefix, restore_prefix
from mlcpipe.runtime.serving.scheduler import Scheduler
from mlcpipe.runtime.serving.sequence import Finish

_IDLE_S = 0.05  # until the next plan, if no sequence can continue
_HELD_S = 0.002  # the same, if a mask is awaited


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
        how = bundle.manifest.model.diffusion
        check_options(how, context_shift=context_shift, drafts=draft_model is not None)
        if context_shift:
            check_shiftable(min(bundle.context_length, kv_tokens))
        max_sequences = max_sequences or bundle.manifest.model.max_batch
        limits = Limits(bundle.context_length, sequences=max_sequences, queue=max_queue, step_s=step_s)
        units = many_sequences(bundle.manifest, bundle.context_length, kv_tokens)
        self._core = Core(bundle, units, limits, adapter_blocks=adapter_blocks, swap_bytes=swap_bytes)
        source = draft_source(self._core, draft_model, kv_tokens, max_sequences) if drafts else None
        self._answers = AnswerLoop(self._core, drafts=drafts, draft_model=source, context_shift=context_shift)
        self._kv_tokens = kv_tokens
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.together = threading.Lock()
        self._closing, self._door = threading.Event(), threading.Lock()  # no request is accepted while closing
        self._jobs: deque[tuple[Generator[None, None, Any], Future[Any]]] = deque()  # run in parts between steps
        self._stopped, self._fault = False, ""
        self._thread = threading.Thread(target=self._run, name="mlcpipe-engine", daemon=True)
        self._thread.start()

    @property
    def _scheduler(self) -> Scheduler:
        """The core's: another one after the loss of a stage."""
        return self._core.scheduler

    @property
    def context_length(self) -> int:
        """Most tokens of a prompt and its answer together."""
        return self._answers.context_length

    @property
    def context_shift(self) -> bool:
        """As `ServingEngine.context_shift`."""
        return self._answers.context_shift

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
        if waiting >= self._core.limits.queue:
            raise OverloadedError(f"{waiting} requests are waiting already", self._scheduler.retry_after_s())

    def submit(self, request: Request, wake: Wake | None = None) -> Stream:
        """As `ServingEngine.submit`."""
        check_request(request, self.context_length, self.vocab_size, shifts=self.context_shift)
        self.check_queue()
        answer = self._answers.answer(request, wake)
        with self._door:
            if self._closing.is_set():
                raise OverloadedError(self._fault or "the server is shutting down", 5.0)
            self._commands.put(partial(self._answers.begin, answer))
        return answer.stream

    def cancel(self, number: int, reason: Literal["cancelled", "stop"] = "cancelled") -> None:
        """As `ServingEngine.cancel`."""
        self._commands.put(partial(self._answers.cancel, number, Finish(reason)))

    def copy_prefix(self, tokens: abc.Sequence[int], namespace: str = "") -> Future[tuple[int, list[NDArray[np.int8]]]]:
        """As `ServingEngine.copy_prefix`."""
        self._check_prefixes()
        return self._between_steps(copy_prefix(self._core, tokens, namespace))

    def restore_prefix(self, saved: SavedChat, namespace: str = "") -> Future[None]:
        """As `ServingEngine.restore_prefix`."""
        self._check_prefixes()
        return self._between_steps(restore_prefix(self._core, saved, namespace))

    def _check_prefixes(self) -> None:
        """Raises UsageError for a model whose pages depend on settings of a request."""
        check_options(self._core.bundle.manifest.model.diffusion, prefixes=True)

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
        self._commands.put(partial(self._answers.release, adapter))

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
        stats = self._answers.stats()
        return replace(stats, waiting=stats.waiting + self._commands.qsize())

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
            self._serve()
        except BaseException as error:
            self._fault = f"the engine failed: {last_line(error)}"
            with self._door:
                self._closing.set()
            with contextlib.suppress(Exception):
                self._take_commands()
            self._answers.end_all(ComputeError("the engine failed", found=last_line(error)))
            raise
        finally:
            self._answers.wake()
            for job, future in self._jobs:
                job.close()
                future.set_exception(OverloadedError(self._fault or "the server is shutting down", 5.0))

    def _serve(self) -> None:
        while not self._stopped:
            if not (self._answers.has_work or self._jobs or self._closing.is_set()):
                self._answers.wake()
                self._commands.get()()
            self._take_commands()
            self._work()
            if self._answers.step() or self._jobs:
                continue
            if self._answers.has_work:  # wait for a change, or a deadline
                self._answers.wake()
                with contextlib.suppress(queue.Empty):
                    self._commands.get(timeout=_HELD_S if self._scheduler.held else _IDLE_S)()
            elif self._closing.is_set() and self._commands.empty():
                return

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

    def _stop(self) -> None:
        for number in list(self._answers.answers):
            self._answers.cancel(number)
        self._stopped = True
