"""The stages of a model before its last: tokens go in, hidden states come out and cross to the next device.

All stages share page ids and slots, so the scheduler knows nothing of them. A forward's integers are copied to every
device when it is prepared; its launch runs one stage after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mlcpipe.devices.base import Device, Reused
from mlcpipe.devices.support import tvm_runtime
from mlcpipe.devices.support.threads import step_threads
from mlcpipe.runtime.loading import LoadedBundle
from mlcpipe.runtime.serving.state_store import StateStore
from mlcpipe.runtime.serving.token_tables import TokenTables

Kind = Literal["decode", "prefill"]


@dataclass
class Transfers:
    """What crossed the borders between stages: hidden states of rows, and their bytes, 4 a number."""

    rows: int = 0
    nbytes: int = 0


class _Stage:
    """A stage that gives hidden states."""

    def __init__(self, part: LoadedBundle, store: StateStore) -> None:
        self.device, self.store, self._width = part.device, store, part.manifest.model.hidden_size
        self._functions = {kind: part.library.vm[kind] for kind in ("decode", "prefill")}
        with self.device.errors():
            self._tables = TokenTables(part)
            self._begin = step_threads(part.library.module if self.device.on_host else None)
            self._steps = {kind: Reused(self.device, "int32") for kind in self._functions}
            self._rows = {kind: Reused(self.device, "int32") for kind in self._functions}
            self.arriving = Reused(self.device, "float32")
            self._handed = self._empty(1)

    def prepare(self, kind: Kind, tokens: NDArray[np.int32] | None, step: NDArray[np.int32]) -> Callable[[Any], Any]:
        """The launch of a forward: (rows of the stage before, None for tokens) -> f32[m, hidden] on the device."""
        with self.device.errors():
            steps = self._steps[kind].put(step)
            if tokens is None:
                return partial(self._launch, kind, steps, self._tables.whole)
            params = self._tables.decode(tokens)[0] if kind == "decode" else self._tables.prompts(tokens)
            own = self._rows[kind].put(tokens)
            return lambda _: self._launch(kind, steps, params, own)

    def _launch(self, kind: Kind, step: Any, params: Any, rows: Any) -> Any:
        count = int(rows.shape[0])
        with self.device.errors():
            if count > self._handed.shape[0]:
                self._handed = self._empty(1 << (count - 1).bit_length())
            handed = tvm_runtime.view(self._handed, (count, self._width))
            self._begin(count if kind == "decode" else -1)
            self._functions[kind](rows, step, handed, self.store.tensors, params)
            self._begin(0)
        return handed

    def _empty(self, rows: int) -> Any:
        return tvm_runtime.empty((rows, self._width), "float32", self.device.handle)


class EarlierStages:
    """All stages but the last. `transfers` counts what crossed the borders."""

    def __init__(self, parts: Sequence[LoadedBundle], stores: Sequence[StateStore], last: Device) -> None:
        self._stages = [_Stage(*each) for each in zip(parts, stores)]
        self._devices = [*(stage.device for stage in self._stages), last]
        with last.errors():
            self._arriving = [*(stage.arriving for stage in self._stages), Reused(last, "float32")]
        self.transfers = Transfers()

    def prepare(self, kind: Kind, tokens: NDArray[np.int32], step: NDArray[np.int32]) -> Callable[[], Any]:
        """The launch of a forward of tokens i32[m]: the hidden states f32[m, hidden] on the last stage's device."""
        first = [tokens, *(None for _ in self._stages[1:])]
        launches = [stage.prepare(kind, given, step) for stage, given in zip(self._stages, first)]

        def launch() -> Any:
            rows: Any = None
            for index, run in enumerate(launches):
                rows = self._across(index, run(rows))
            return rows

        return launch

    def _across(self, index: int, rows: Any) -> Any:
        """Hidden states of a stage on the device of the next one; the same tensor where both compute on the host."""
        here, there = self._devices[index : index + 2]
        self.transfers.rows += int(rows.shape[0])
        self.transfers.nbytes += 4 * int(rows.shape[0]) * int(rows.shape[1])
        if here.on_host and there.on_host:
            return rows
        with here.errors():
            host = tvm_runtime.array(here.read(rows))
        with there.errors():
            return self._arriving[index + 1].put(host)
