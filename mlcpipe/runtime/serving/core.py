"""Scheduler, executor and sampler over one bundle: computes the steps of a server, a benchmark and tests."""

from __future__ import annotations

import time
import weakref
from collections import abc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mlcpipe.bundle import Manifest
from mlcpipe.bundle.memory import Units
from mlcpipe.bundle.model_info import MAX_ASKED, WholeAnswerInfo
from mlcpipe.bundle.states import windows_of
from mlcpipe.devices.base import Device
from mlcpipe.devices.support import tvm_runtime
from mlcpipe.devices.support.step_recorder import StepRecorder
from mlcpipe.errors import ComputeError
from mlcpipe.runtime.loading import LoadedBundle
from mlcpipe.runtime.not_finite import compute_error, of_states
from mlcpipe.runtime.sampler import Masks, Row, Sampler
from mlcpipe.runtime.sampling_params import SamplingParams
from mlcpipe.runtime.serving.cost_model import CostModel
from mlcpipe.runtime.serving.denoised import denoising_as_stated
from mlcpipe.runtime.serving.executor import Executor, Forward
from mlcpipe.runtime.serving.limits import Limits
from mlcpipe.runtime.serving.page_pool import PageGroup, PagePool
from mlcpipe.runtime.serving.prefix_tree import PrefixTree
from mlcpipe.runtime.serving.scheduler import Scheduler
from mlcpipe.runtime.serving.sequence import Sequence, State
from mlcpipe.runtime.serving.step import NOT_DRAWN, PrefillRows, Step
from mlcpipe.runtime.serving.swap import Swap
from tir_schedules.step_layout import PAGE

_SCORED_BYTES = 64 << 20  # of logits of prompts, or of masks, in a step
GREEDY = Row(SamplingParams(temperature=0.0))


def pool_of(manifest: Manifest, units: Units) -> PagePool:
    """A pool of free units of a model's states."""
    return PagePool([PageGroup(*each) for each in zip(units.pages, windows_of(manifest.states))], units.slots)


class Drawn(NamedTuple):
    """The new token of a sequence, -1 where its logits are not finite, and how it was sampled.

    `logits()` is f32[V] as sampling left them.
    """

    sequence: Sequence
    token: int
    settings: Row
    logits: Callable[[], NDArray[np.float32]]


class Core:
    """Plan a step with `scheduler`, `compute` it, settle it.

    A request's `params` are the `Row` for sampling. `limits` are lowered to what the bundle and these units of its
    states can do. `adapter_blocks` is the room for adapters, `swap_bytes` that on the host for pages of preempted
    sequences; the device then has its own memory, and the model's layers keep all tokens. `first_rows` as in
    `Executor`.
    """

    def __init__(
        self,
        bundle: LoadedBundle,
        units: Units,
        limits: Limits,
        cost: CostModel | None = None,
        adapter_blocks: int = 0,
        swap_bytes: int = 0,
        first_rows: int = 0,
    ) -> None:
        model = bundle.manifest.model
        scored = _SCORED_BYTES // (4 * model.vocab_size)
        self.denoising = None if model.diffusion is None else denoising_as_stated(model.diffusion)
        self.bundle, self.units, self.sampler = bundle, units, Sampler(bundle)
        uncut = model.vision.rows if model.vision is not None and model.vision.ahead else 0
        whole = isinstance(model.diffusion, WholeAnswerInfo)
        masked = MAX_ASKED if whole else max(model.max_batch, scored)
        self.limits = replace(
            limits,
            context=min(limits.context, bundle.context_length, units.pages[0] * PAGE),
            prefill_chunk=model.prefill_chunk if whole else min(max(limits.prefill_chunk, uncut), model.prefill_chunk),
            decode_rows=min(limits.decode_rows, model.max_batch),
            sequences=min(limits.sequences, model.max_batch),
            recompute_above=model.recompute_above,
            whole_pictures=uncut > 0,
            scored_rows=min(model.prefill_chunk, max(PAGE, scored)),
            masked_rows=min(model.prefill_chunk, masked),
        )
        self.executor = Executor(bundle, units, self.limits.decode_rows, adapter_blocks, first_rows)
        self.recorder = StepRecorder() if bundle.stages else bundle.device.step_recorder()
        self._launching_waits = bundle.device.on_host or bool(bundle.stages)
        weakref.finalize(self, self.recorder.close)
        self._cost, self._swap_bytes = cost or CostModel(), swap_bytes
        self.reset()

    def forget(self) -> None:
        """Forget everything that was computed and that no sequence in progress uses."""
        scheduler = self.scheduler
        if not scheduler.has_work:
            self.reset()
            return
        while scheduler.admission.unpark():
            pass
        scheduler.tree.evict([len(units.idle) for units in scheduler.pool.units])

    def ready(self) -> bool:
        """Whether a step can be computed now: False while stages on other machines are loaded again."""
        return self.executor.earlier is None or self.executor.earlier.ready()

    def reset(self) -> None:
        """Forget all sequences, also those in progress, and everything that was computed."""
        model = self.bundle.manifest.model
        pool = pool_of(self.bundle.manifest, self.units)
        tree = PrefixTree(pool, model.recompute_above, model.rope_above)
        self.scheduler = Scheduler(pool, tree, self._cost, self.limits)
        if self._swap_bytes:
            self.scheduler.admission.swap = Swap(self.executor, tree, self._cost, self._swap_bytes)

    def encode_pictures(self, step: Step) -> list[tuple[Sequence, Exception]]:
        """Have the rows of pictures that a step's prompts need, before `forward`; its time is none of the step's.

        The step loses the prompts whose pictures fail, which are returned with their errors.
        """
        failed: dict[Sequence, Exception] = {}
        if self.executor.pictures is not None and any(one.sequence.request.pictures for one in step.prefill):
            began = time.monotonic()
            for rows in step.prefill:
                try:
                    self.executor.pictures.encode((rows,))
                except Exception as error:
                    failed[rows.sequence] = error
            step.prefill = [rows for rows in step.prefill if rows.sequence not in failed]
            step.planned += time.monotonic() - began
        return [*failed.items()]

    def compute(self, step: Step, take: Callable[[Drawn], None] = lambda drawn: None) -> list[int]:
        """The tokens of a step for `Scheduler.settle`; accepted ones are passed to `take` first.

        Not of a step with a canvas, whose tokens `forward` has with their probabilities.
        """
        self.copy_pages(step)
        return [token for one in self.forward(step) for token in one.take(take)]

    def forward(self, step: Step, waits: Callable[[], None] = lambda: None) -> list[Computed]:
        """The rows of a step with logits, after `copy_pages`.

        `waits` is called when this thread is about to wait for the device. An exception ends it without a change of
        the accounts, so that the step may be planned again.
        """
        executor, parts = self.executor, []
        with self.bundle.device.errors():
            prefill = None
            if step.decode:
                decode = executor.decode(step.decode)
                if step.prefill and self.bundle.elsewhere is not None:  # its stages compute ahead
                    prefill = executor.prefill(step.prefill)
                parts.append(self._launch(_decode_rows(step), decode, waits))
            if step.prefill:
                scored = [rows for rows in step.prefill if rows.sequence.request.scored]
                prefill = prefill or executor.prefill(step.prefill)
                parts.append(self._launch(_prefill_rows(step), prefill, waits, scored))
            if not self._launching_waits:
                waits()
            return [self._read(*part) for part in parts]

    def copy_pages(self, step: Step) -> None:
        """The copies of a step, before `forward`."""
        if step.copies:
            with self.bundle.device.errors():
                self.executor.copy_pages(step.copies)

    def not_finite(self, sequence: Sequence) -> ComputeError:
        """The error for a sequence whose logits are not finite."""
        return compute_error(self.bundle, lambda: of_states(self.bundle.manifest.states, self.executor, sequence))

    def _launch(
        self,
        rows: abc.Sequence[_Row],
        forward: Forward,
        waits: Callable[[], None],
        scored: abc.Sequence[PrefillRows] = (),
    ) -> tuple[abc.Sequence[_Row], abc.Sequence[PrefillRows], abc.Sequence[Row], Masks | None, Any, Any]:
        """Rows, how they are sampled, and their logits f32[r, V] and tokens i32[r], being computed on the device.

        Logits of `scored` rows follow.
        """
        settings = [row.sequence.request.params.after(row.draft) if row.wanted else GREEDY for row in rows]
        masks = self.sampler.masks(settings)
        # Positions count tokens that a shifted context lost, so that no random number is used twice.
        positions = [row.sequence.dropped + row.position for row in rows]
        key = self.sampler.prepare(settings, positions) if rows else None

        def work() -> tuple[Any, Any]:
            logits = forward.launch()
            sampled = tvm_runtime.view(logits, (len(rows), logits.shape[1])) if scored and rows else logits
            return logits, self.sampler.sample(sampled, masks) if rows else None

        recorded = forward.key is not None and masks is None
        if self._launching_waits:
            waits()
        return rows, scored, settings, masks, *self.recorder.run(work, (forward.key, key) if recorded else None)

    def _read(
        self,
        rows: abc.Sequence[_Row],
        scored: abc.Sequence[PrefillRows],
        settings: abc.Sequence[Row],
        masks: Masks | None,
        logits: Any,
        drawn: Any,
    ) -> Computed:
        found, *confidence = drawn if self.denoising is not None and rows else (drawn,)
        found, *confidence = (self._numbers(one) if rows else [] for one in (found, *confidence))
        late = () if masks is None else masks.late
        return Computed(
            rows, settings, late, found, self.bundle.device, logits, scored, confidence[0] if confidence else ()
        )

    def _numbers(self, tensor: Any) -> list[Any]:
        numbers: list[Any] = tvm_runtime.array(self.bundle.device.read(tensor)).tolist()
        return numbers


@dataclass
class Computed:
    """Rows with logits f32[r, V] of one forward: how each is sampled, and its token.

    The masks of the rows with an index in `late` came too late. Logits of all rows of `scored` follow. `confidence`: of
    tokens that are proposed for places of a canvas.
    """

    rows: abc.Sequence[_Row]
    settings: abc.Sequence[Row]
    late: abc.Collection[int]
    found: list[int]
    device: Device
    logits: Any
    scored: abc.Sequence[PrefillRows] = ()
    confidence: abc.Sequence[float] = ()
    _on_host: NDArray[np.float32] | None = None

    def scores(self) -> Iterator[tuple[PrefillRows, NDArray[np.float32]]]:
        """The scored rows with their logits f32[rows, V]."""
        begin = len(self.rows)
        for one in self.scored:
            self._row(0)
            assert self._on_host is not None
            yield one, self._on_host[begin : begin + one.rows]
            begin += one.rows

    def take(self, take: Callable[[Drawn], None]) -> list[int]:
        """The tokens of the wanted rows, for `Scheduler.settle`; accepted ones are passed to `take` first."""
        tokens: list[int] = []
        stands = True
        for index, row in enumerate(self.rows):
            if row.wanted and index in self.late:
                tokens.append(NOT_DRAWN)
                stands = False
            elif row.wanted:
                stands = not row.draft or (stands and tokens[-1] == row.draft[-1])
                tokens.append(max(self.found[index], 0))
                stands &= not self.confidence or self.found[index] < 0  # proposed tokens are not accepted yet
                if stands and row.of.state is not State.ENDED:
                    take(Drawn(row.sequence, self.found[index], self.settings[index], partial(self._row, index)))
        return tokens

    def _row(self, index: int) -> NDArray[np.float32]:
        if self._on_host is None:
            self._on_host = tvm_runtime.array(self.device.read(self.logits))
        row: NDArray[np.float32] = self._on_host[index]
        return row


class _Row(NamedTuple):
    """A row of logits: for the token at this position of `sequence`, computed with the pages of `of`.

    Of a canvas `position` is the number of its random number. Its token is accepted if those of `draft`, which it
    follows, are the sampled ones.
    """

    sequence: Sequence
    position: int
    wanted: bool
    of: Sequence
    draft: abc.Sequence[int] = ()


def _decode_rows(step: Step) -> list[_Row]:
    """All rows of the decode forward."""
    return [
        _Row(sequence, sequence.computed + at + 1, at >= len(tokens) - logits, sequence, sequence.draft[:at])
        for sequence, tokens, logits in step.decode
        for at in range(len(tokens))
    ]


def _prefill_rows(step: Step) -> list[_Row]:
    """The rows of the prefill forward that give logits."""
    rows = []
    for of, begin, count, drawing, canvas in step.prefill:
        rows += [_Row(one, begin + count, True, of) for one in drawing]
        if canvas is not None:
            first = begin + count - len(canvas.tokens)
            rows += [_Row(of, canvas.number(first + place), True, of) for place in canvas.asked]
    return rows
