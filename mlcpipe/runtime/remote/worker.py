"""What the process of a stage does: it looks at its part of the bundle, loads it, and computes forwards in order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlcpipe.bundle.memory import Units, running_bytes
from mlcpipe.bundle.states import State
from mlcpipe.devices.support import tvm_runtime
from mlcpipe.errors import ComputeError, ResourceError
from mlcpipe.host.finding import byte_size
from mlcpipe.host.memory import FreeMemory
from mlcpipe.runtime.loading import LoadedBundle, OpenedPart, choose_context_length, load_part, open_stage
from mlcpipe.runtime.remote.lane import Lane, Place, Rows, StageLostError
from mlcpipe.runtime.serving.stages import Kind, Stage
from mlcpipe.runtime.serving.state_store import StateStore
from tir_schedules.step_layout import ROWS

Feed = Callable[[Place, Rows], Any]  # gives rows to the stage after this one -> what tells that they arrived


@dataclass(frozen=True)
class StageReport:
    """What a stage's process found before it loads anything.

    `free` is the memory of its device, in which the weights and states must fit, `variant` that of its library.
    """

    device: str
    free: FreeMemory
    max_tensor_bytes: int
    variant: str


class StageWorker:
    """Stage `index` of the bundle in a folder, which needs no files of other stages.

    `after` gives its rows to the next stage; without one, they are the result of a forward. Calls of different methods
    may come from different threads; those with a `Place` are computed in order.
    """

    def __init__(self, folder: Path, index: int, device: str | None, name: str, after: Feed | None) -> None:
        self._folder, self._index, self._spec, self._name, self._after = folder, index, device, name, after
        self._loading = threading.Lock()
        self._opened: OpenedPart | None = None
        self._part: LoadedBundle | None = None
        self._stage: Stage | None = None
        self._store: StateStore | None = None
        self._units: Units | None = None
        self._lane = Lane(name)

    def look(self) -> StageReport:
        """Check the stage's files and its device. Raises BundleError, TargetError and UsageError."""
        with self._loading:
            self._opened = self._opened or open_stage(self._folder, self._index, self._spec)
            device = self._opened.device
            with device.errors():
                free = device.free_memory()
            return StageReport(device.description, free, device.max_tensor_bytes, self._opened.variant.name)

    def load(
        self, context_length: int, threads: int | None, states: Sequence[State], units: Units | None
    ) -> StageReport:
        """Load the stage, and allocate its part of the model's `states` where their `units` are known -> a new report.

        What is there already stays, and states for other units are replaced. Raises ResourceError where the memory of
        this machine does not hold it.
        """
        self.look()
        with self._loading:
            assert self._opened is not None
            if self._part is None:
                part, device = self._opened.part, self._opened.device
                choose_context_length(self._opened.whole, context_length, [(part.manifest, device)])
                self._part = load_part(self._opened, context_length, threads)
            if units is not None and units != self._units:  # the same again keeps what is computed
                self._allocate(self._part, states, units)
        return self.look()

    def _allocate(self, part: LoadedBundle, states: Sequence[State], units: Units) -> None:
        self._stage, self._store, self._units = None, None, None  # one's memory before another's
        with part.device.errors():
            free = part.device.free_memory()
            needed = units.nbytes(states, part.manifest.states) + running_bytes(part.manifest)
            if needed > free.nbytes:
                raise ResourceError(
                    f"not enough memory for the keys and values of {self._name}", where=part.device.description,
                    expected=f"{byte_size(needed)} free", found=free,
                    next_step="serve fewer --sequences, a shorter --context, or fewer layers there",
                )  # fmt: skip
            store = StateStore(part, states, units)
        self._stage, self._store, self._units = Stage(part, store, None), store, units

    def call(self, place: Place, name: str, arguments: Sequence[Any]) -> Future[Any]:
        """Queue a call: `forward`, `copy_pages`, `read_units` or `write_units`.

        Raises StageLostError where the stage is not loaded, as after a restart.
        """
        stage, store = self._stage, self._store
        if stage is None or store is None:
            raise StageLostError(f"{self._name} is not loaded", next_step="it loads; try again in a few seconds")
        if name == "forward":
            kind, step, tokens, onward, fed = arguments
            return self._lane.put(
                place, lambda rows: self._forward(stage, kind, step, tokens, rows, onward), fed=bool(fed)
            )
        works: dict[str, Callable[..., Any]] = {
            "copy_pages": store.copy_pages,
            "read_units": store.read_units,
            "write_units": store.write_units,
        }
        work = works[name]
        return self._lane.put(place, lambda rows: work(*arguments))

    def feed(self, place: Place, rows: Rows) -> None:
        """The rows of the stage before, for the forward of a place."""
        self._lane.feed(place, rows)

    def close(self) -> None:
        """End after the call that runs."""
        self._lane.close()

    def _forward(
        self, stage: Stage, kind: Kind, step: NDArray[np.int32], tokens: NDArray[np.int32] | None, rows: Rows | None,
        onward: Place | None,
    ) -> Any:  # fmt: skip
        """The stage's rows f32[m, hidden], or what `after` returns: the next stage gets them, for its call `onward`."""
        count = int(step[ROWS])
        arrived = rows if rows is not None else tokens
        found = None if arrived is None else arrived.shape
        expected: tuple[int, ...] = (count,) if rows is None else (count, stage.width)
        if found != expected:
            raise ComputeError(f"rows for {self._name}", expected=expected, found=found)
        device = stage.device
        with device.errors():
            given = None if rows is None else stage.arriving.put(np.array(rows, np.float32))
            made = stage.prepare(kind, tokens, step)(given)
            handed: Rows = tvm_runtime.array(device.read(made)).copy()
        if onward is None or self._after is None:
            return handed
        return self._after(onward, handed)
