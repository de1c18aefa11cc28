"""The states of a model, or of a stage of it, on their device: allocated, copied, read and written by unit."""

from __future__ import annotations

from collections import abc
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tvm_ffi
from numpy.typing import NDArray

from mlcpipe.bundle.memory import Units
from mlcpipe.bundle.states import State
from mlcpipe.devices.support import tvm_runtime
from mlcpipe.runtime.loading import LoadedBundle

UnitBytes = NDArray[np.int8]  # int8[n, unit_bytes] of a state


class StateStore:
    """The states `table` of a part of a bundle, whose ids are those of the whole model's `states`."""

    def __init__(self, part: LoadedBundle, states: Sequence[State], units: Units) -> None:
        self.table = part.manifest.states if part.manifest.model.stage is not None else tuple(states)
        self._device, self._copy = part.device, part.library.vm["copy_pages"]
        self.tensors: Any = tvm_ffi.convert(
            [
                tvm_runtime.empty((units.of(states, state), state.unit_items), state.dtype, self._device.handle)
                for state in self.table
            ]
        )

    def copy_pages(self, pairs: abc.Sequence[NDArray[np.int32]]) -> None:
        """Copy pages i32[c, 2] of each group, (source, target)."""
        with self._device.errors():
            self._copy(tvm_ffi.convert([self._device.tensor(several) for several in pairs]), self.tensors)

    def read_units(self, index: int, ids: abc.Sequence[int]) -> UnitBytes:
        """A copy int8[n, unit_bytes] of units of a state, in the order of `ids`, which differ."""
        units = np.empty((len(ids), self.table[index].unit_bytes), np.int8)
        with self._device.errors():
            for places, run in self._runs(index, ids):
                units[places] = tvm_runtime.array(self._device.read(run)).view(np.int8)
        return units

    def write_units(self, index: int, ids: abc.Sequence[int], units: UnitBytes) -> None:
        """Write units as `read_units` returns them."""
        dtype = self.table[index].dtype
        with self._device.errors():
            for places, run in self._runs(index, ids):
                self._device.put(run, np.ascontiguousarray(units[places]).view(dtype))

    def _runs(self, index: int, ids: abc.Sequence[int]) -> Iterator[tuple[NDArray[np.intp], Any]]:
        """Views of adjacent units, each with their places in `ids`: one copy takes them all."""
        order, wanted, state = np.argsort(ids), np.sort(ids), self.table[index]
        for places in np.split(order, np.flatnonzero(np.diff(wanted) != 1) + 1) if len(ids) else ():
            begin = int(ids[places[0]]) * state.unit_bytes
            yield places, tvm_runtime.view(self.tensors[index], (len(places), state.unit_items), begin)
