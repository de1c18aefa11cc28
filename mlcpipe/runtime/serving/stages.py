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
import tvm_ffi
from numpy.typing import NDArray

from mlcpipe.bundle.stages import stage_of
from mlcpipe.devices.base import Device, Reused
from mlcpipe.devices.support import tvm_runtime
from mlcpipe.devices.support.threads import step_threads
from mlcpipe.runtime.loading import LoadedBundle
from mlcpipe.runtime.serving.state_store import StateStore
from mlcpipe.runtime.serving.token_tables import TokenTables

Kind = Literal["decode", "prefill"]


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


class _Stage:
    """A stage that gives hidden states."""

    def __init__(self, part: LoadedBundle, store: StateStore, experts: Experts | None) -> None:
        self.device, self.store, self._width = part.device, store, part.manifest.model.hidden_size
        self._experts = experts_argument(part, experts)
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
            self._functions[kind](rows, step, handed, self.store.tensors, *self._experts, params)
            self._begin(0)
        return handed

    def _empty(self, rows: int) -> Any:
        return tvm_runtime.empty((rows, self._width), "float32", self.device.handle)


class EarlierStages:
    """All stages but the last. `transfers` counts what crossed the borders."""

    def __init__(
        self, parts: Sequence[LoadedBundle], stores: Sequence[StateStore], last: Device, experts: Experts | None
    ) -> None:
        self._stages = [_Stage(*each, experts) for each in zip(parts, stores)]
        self._devices = [*(stage.device for stage in self._stages), last]
        with last.errors():
            self._arriving = [*(stage.arriving for stage in self._stages), Reused(last, "float32")]
        self.transfers = Transfers()

    def prepare(self, kind: Kind, tokens: NDArray[np.int32], step: NDArray[np.int32]) -> Callable[[], Any] | None:
        """The launch of a forward of tokens i32[m]: the hidden states f32[m, hidden] on the last stage's device.

        None where the last stage is the first, too.
        """
        if not self._stages:
            return None
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
