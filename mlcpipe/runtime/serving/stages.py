"""The stages of a model before its last: tokens go in, hidden states come out and cross to the next device.

All stages share page ids and slots, so the scheduler knows nothing of them. A forward's integers are copied to every
device when it is prepared; its launch runs one stage after the other, or of a prompt one piece after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import numpy as np
import tvm_ffi
from numpy.typing import NDArray

from mlcpipe.bundle.stages import stage_of
from mlcpipe.devices.base import Device, Reused
from mlcpipe.devices.support import tvm_runtime
from mlcpipe.devices.support.threads import step_threads
from mlcpipe.runtime.loading import LoadedBundle
from mlcpipe.runtime.serving.state_store import StateStore
from mlcpipe.runtime.serving.step import PrefillRows
from mlcpipe.runtime.serving.token_tables import TokenTables
from tir_schedules.step_layout import PAGE

Kind = Literal["decode", "prefill"]
Launch = Callable[[Any], Any]  # of a stage: rows of the one before -> its own


@dataclass
class Transfers:
    """What crossed borders between devices: hidden states of rows, and the bytes of these and what went with them."""

    rows: int = 0
    nbytes: int = 0


class Experts:
    """Experts on a device of their own, which the forwards of stages call. `transfers` counts what crossed."""

    def __init__(self, part: LoadedBundle) -> None:
        vm, stage = part.library.vm, stage_of(part.manifest)
        assert stage is not None
        self._device, self._width = part.device, part.manifest.model.hidden_size
        self._params, self.transfers = part.params, Transfers()
        self._functions = [
            {
                layer: vm[name]
                for layer in range(stage.begin, stage.end)
                if vm.implements_function(name := named % layer)
            }
            for named in ("experts_decode_%d", "experts_prefill_%d")
        ]
        with self._device.errors():
            self._begin = step_threads(part.library.module if self._device.on_host else None)
            self._arriving = [Reused(self._device, dtype) for dtype in ("float32", "float32", "int32")]
            self._handed = tvm_runtime.empty((1, self._width), "float32", self._device.handle)

    def called_by(self, there: Device) -> Any:
        """The argument `experts` of a stage's forwards on a device."""
        return tvm_ffi.convert(partial(self._call, there))

    def _call(self, there: Device, layer: int, of_prompt: int, rows: Any, weights: Any, ids: Any, out: Any) -> None:
        """Write what experts i32[m, chosen] with weights f32[m, chosen] make of rows f32[m, hidden] to `out`."""
        count, top = (int(size) for size in ids.shape)
        self.transfers.rows += count
        self.transfers.nbytes += 8 * count * (self._width + top)
        shared = self._device.on_host and there.on_host
        inputs, handed = [rows, weights, ids], out
        if not shared:
            with there.errors():
                host = [tvm_runtime.array(there.read(one)).copy() for one in inputs]
            with self._device.errors():
                inputs = [reused.put(one) for reused, one in zip(self._arriving, host)]
                if count > self._handed.shape[0]:
                    size = 1 << (count - 1).bit_length()
                    self._handed = tvm_runtime.empty((size, self._width), "float32", self._device.handle)
                handed = tvm_runtime.view(self._handed, (count, self._width))
        with self._device.errors():
            self._begin(-1 if of_prompt else count)
            self._functions[of_prompt][layer](*inputs, handed, self._params)
            self._begin(0)
            host_out = None if shared else tvm_runtime.array(self._device.read(handed))
        if host_out is not None:
            with there.errors():
                there.put(out, host_out)


def experts_argument(part: LoadedBundle, experts: Experts | None) -> tuple[Any, ...]:
    """The argument `experts` of a stage's forwards, if they have one."""
    stage = stage_of(part.manifest)
    if experts is None or stage is None or not stage.calls:
        return ()
    return (experts.called_by(part.device),)


class Stage:
    """A stage that gives hidden states f32[m, width]."""

    def __init__(self, part: LoadedBundle, store: StateStore, experts: Experts | None) -> None:
        self.device, self.store, self.width = part.device, store, part.manifest.model.hidden_size
        self._experts = experts_argument(part, experts)
        self._functions = {kind: part.library.vm[kind] for kind in ("decode", "prefill")}
        with self.device.errors():
            self._tables = TokenTables(part)
            self._begin = step_threads(part.library.module if self.device.on_host else None)
            self._steps = {kind: Reused(self.device, "int32") for kind in self._functions}
            self._rows = {kind: Reused(self.device, "int32") for kind in self._functions}
            self.arriving = Reused(self.device, "float32")
            self._handed = self._empty(1)

    def prepare(
        self, kind: Kind, tokens: NDArray[np.int32] | None, step: NDArray[np.int32], *, alone: bool = True
    ) -> Launch:
        """The launch of a forward: (rows of the stage before, None for tokens) -> f32[m, hidden] on the device.

        If not `alone`, others are prepared before it is launched.
        """
        with self.device.errors():
            steps = self._steps[kind].put(step) if alone else self.device.tensor(step)
            if tokens is None:
                return partial(self._launch, kind, steps, self._tables.whole)
            params = self._tables.decode(tokens)[0] if kind == "decode" else self._tables.prompts(tokens)
            own = self._rows[kind].put(tokens) if alone else self.device.tensor(tokens)
            return lambda _: self._launch(kind, steps, params, own)

    def _launch(self, kind: Kind, step: Any, params: Any, rows: Any) -> Any:
        count = int(rows.shape[0])
        with self.device.errors():
            if count > self._handed.shape[0]:
                self._handed = self._empty(1 << (count - 1).bit_length())
            handed = tvm_runtime.view(self._handed, (count, self.width))
            self._begin(count if kind == "decode" else -1)
            self._functions[kind](rows, step, handed, self.store.tensors, *self._experts, params)
            self._begin(0)
        return handed

    def _empty(self, rows: int) -> Any:
        return tvm_runtime.empty((rows, self.width), "float32", self.device.handle)


def pieces_of(rows: Sequence[PrefillRows], piece_rows: int) -> list[list[PrefillRows]]:
    """The rows of a forward in up to 4 pieces of about one size, cut where pages end; or all of them in one.

    Pieces have `piece_rows` or more. Rows that states in slots pass on from one to the next stay together.
    """
    total = sum(one.rows for one in rows)
    count = min(4, total // piece_rows)
    if count < 2 or any(one.sequence.next_slot >= 0 or one.canvas for one in rows):
        return [list(rows)]
    size = room = -(-total // count)
    found: list[list[PrefillRows]] = [[]]
    for one in rows:
        begin, end = one.begin, one.begin + one.rows
        while begin < end:
            page = max((begin + room) // PAGE, begin // PAGE + 1) * PAGE
            cut = end if end - begin <= room else min(page, end)
            found[-1].append(PrefillRows(one.sequence, begin, cut - begin, one.drawing if cut == end else ()))
            room, begin = room - (cut - begin), cut
            if room < PAGE:
                found, room = [*found, []], size
    return [piece for piece in found if piece]


class Earlier(Protocol):
    """All stages but the last, here or elsewhere."""

    @property
    def transfers(self) -> Transfers:
        """What crossed all borders."""

    def ready(self) -> bool:
        """Whether a forward can be computed now. Raises StageLostError for stages that do not come back."""

    def pieces(self, rows: Sequence[PrefillRows]) -> list[list[PrefillRows]]:
        """The rows of a prompt's forward in pieces that stages compute at the same time; or all of them in one."""

    def prepare(self, kind: Kind, tokens: NDArray[np.int32], step: NDArray[np.int32], *, alone: bool = True) -> Any:
        """A forward of tokens i32[m], for `run` or `run_ahead`. If not `alone`, others are prepared before those."""

    def run(self, prepared: Any) -> Any:
        """Hidden states f32[m, hidden] on the last stage's device."""

    def run_ahead(self, pieces: Sequence[Any]) -> Generator[Any, None, None]:
        """As `run` for each piece in order, while the stages compute later pieces. It is to be closed."""


class EarlierStages:
    """All stages but the last. `transfers` counts what crossed the borders.

    `overlaps`: a prompt's rows go through the stages in pieces of `piece_rows` or more, each device computing one of
    them; not where stages share a device.
    """

    def __init__(
        self, parts: Sequence[LoadedBundle], stores: Sequence[StateStore], last: Device, experts: Experts | None
    ) -> None:
        self._stages = [Stage(*each, experts) for each in zip(parts, stores)]
        self._devices = [*(stage.device for stage in self._stages), last]
        with last.errors():
            self._arriving = [*(stage.arriving for stage in self._stages), Reused(last, "float32")]
        self._crossed = [Transfers() for _ in self._stages]  # each border is counted by one thread
        self.piece_rows = 128
        self.overlaps = experts is None and len({one.spec for one in self._devices}) == len(self._devices) > 1
        self._workers = [ThreadPoolExecutor(1, f"mlcpipe-stage-{index}") for index in range(len(self._stages))]

    @property
    def transfers(self) -> Transfers:
        """What crossed all borders."""
        return Transfers(sum(one.rows for one in self._crossed), sum(one.nbytes for one in self._crossed))

    def ready(self) -> bool:
        """Always: they are in this process."""
        return True

    def pieces(self, rows: Sequence[PrefillRows]) -> list[list[PrefillRows]]:
        """As `pieces_of` where the stages overlap, else all rows in one."""
        return pieces_of(rows, self.piece_rows) if self.overlaps else [list(rows)]

    def prepare(
        self, kind: Kind, tokens: NDArray[np.int32], step: NDArray[np.int32], *, alone: bool = True
    ) -> list[Launch]:
        """The launches of a forward of tokens i32[m], one for each stage, for `run` or `run_ahead`."""
        first = [tokens, *(None for _ in self._stages[1:])]
        return [stage.prepare(kind, given, step, alone=alone) for stage, given in zip(self._stages, first)]

    def run(self, launches: Sequence[Launch]) -> Any:
        """Hidden states f32[m, hidden] on the last stage's device, one stage after the other."""
        rows: Any = None
        for index, launch in enumerate(launches):
            rows = launch(rows)
            here, there = self._devices[index : index + 2]
            if here.on_host and there.on_host:
                self._count(index, rows)
            else:
                rows = self._arrive(index, self._leave(index, rows))
        return rows

    def run_ahead(self, pieces: Sequence[Sequence[Launch]]) -> Generator[Any, None, None]:
        """As `run` for each piece in order, while the stages compute later pieces. It is to be closed."""
        last: list[Future[Any]] = []
        every: list[Future[Any]] = []
        for index, worker in enumerate(self._workers):
            before: list[Future[Any] | None] = [*last] if last else [None] * len(pieces)
            last = [worker.submit(self._piece, index, piece[index], one) for piece, one in zip(pieces, before)]
            every += last
        try:
            for one in last:
                yield self._arrive(len(self._stages) - 1, one.result())
        finally:  # after an error or Ctrl-C, nothing computes any more
            for one in every:
                one.cancel()
            wait(every)

    def _piece(self, index: int, launch: Launch, before: Future[Any] | None) -> NDArray[np.float32]:
        rows = launch(None if before is None else self._arrive(index - 1, before.result()))
        return self._leave(index, rows)

    def _leave(self, index: int, rows: Any) -> NDArray[np.float32]:
        """A copy on the host of a stage's hidden states."""
        self._count(index, rows)
        with self._devices[index].errors():
            host: NDArray[np.float32] = tvm_runtime.array(self._devices[index].read(rows))
            return host.copy() if self.overlaps else host

    def _arrive(self, index: int, host: NDArray[np.float32]) -> Any:
        """Hidden states of stage `index` on the device of the next one."""
        with self._devices[index + 1].errors():
            return self._arriving[index + 1].put(host)

    def _count(self, index: int, rows: Any) -> None:
        count, width = (int(size) for size in rows.shape)
        self._crossed[index].rows += count
        self._crossed[index].nbytes += 4 * count * width
