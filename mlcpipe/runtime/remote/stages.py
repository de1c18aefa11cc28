"""All stages but the last, as processes on other machines: the executor of the last one sends them its steps.

Each stage gets a step's integers from here, and rows from the stage before; rows of the one before the last come here.
A forward is sent when it is prepared, so that stages compute later pieces of prompts while this one computes earlier
ones. A stage that fails or ends makes all calls of its epoch fail; the next epoch begins with stages that are loaded.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent import futures
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from mlcpipe.bundle.memory import Units
from mlcpipe.bundle.states import State
from mlcpipe.devices.base import Device, Reused
from mlcpipe.errors import MlcpipeError, last_line
from mlcpipe.host.memory import FreeMemory
from mlcpipe.runtime.remote.lane import Place, Rows, StageLostError
from mlcpipe.runtime.remote.worker import StageReport
from mlcpipe.runtime.serving.stages import Kind, Transfers, pieces_of
from mlcpipe.runtime.serving.state_store import UnitBytes
from mlcpipe.runtime.serving.step import PrefillRows

_PING_S = 5.0  # after so long without a result, stages are asked whether they are there
_SILENT_S = 30.0  # a stage that does not answer this for so long is ended
_BACK_S = 600.0  # a stage that ended must be loaded again after so long: weights may come from a slow disk
_RETRY_S = 0.5
_PIECE_ROWS = 128
T = TypeVar("T")


class Link(Protocol):
    """A stage's process: calls of `StageWorker`'s methods, which return at once; their errors are of `MlcpipeError`."""

    name: str

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """The result of `StageWorker.method`, None of `ping`. A future of a process that has ended: StageLostError."""

    def end(self) -> None:
        """End the process; another one takes its place."""


@dataclass(frozen=True)
class RemoteDevice(Device):
    """A device of another machine, as its process reports it: enough to plan memory."""

    KIND: ClassVar[str] = "remote"
    TYPE: ClassVar[int] = 0

    report: StageReport

    @property
    def description(self) -> str:
        return self.name

    def free_memory(self) -> FreeMemory:
        return self.report.free

    @property
    def max_tensor_bytes(self) -> int:
        return self.report.max_tensor_bytes

    def errors(self) -> AbstractContextManager[None]:
        return nullcontext()


class _Sent(NamedTuple):
    """A forward on its way: results of all stages, of which the last has the rows."""

    results: tuple[Future[Any], ...]


class RemoteStages:
    """The stages of `links` in order. Its methods are called by one thread at a time."""

    def __init__(self, links: Sequence[Link], last: Device, *, piece_rows: int = _PIECE_ROWS) -> None:
        self._links, self._last, self._piece_rows = links, last, piece_rows
        with last.errors():
            self._arriving = Reused(last, "float32")
        self._epoch, self._numbers = 0, [0] * len(links)
        self._loading: tuple[Any, ...] = ()
        self._lost: Future[None] | None = None
        self.transfers = Transfers()

    def look(self) -> list[StageReport]:
        """The reports of all stages. Raises the errors of `StageWorker.look`."""
        return _all([link.call("look") for link in self._links])

    def load(
        self, context_length: int, threads: int | None, states: Sequence[State], meanwhile: Callable[[], T]
    ) -> tuple[T, list[StageReport]]:
        """Load all stages, and do something else meanwhile. Raises the errors of `StageWorker.load`."""
        self._loading = context_length, threads, tuple(states), None
        loading = [link.call("load", *self._loading) for link in self._links]
        try:
            made = meanwhile()
        finally:
            reports = _all(loading)
        return made, reports

    def allocate(self, units: Units, tables: Sequence[Sequence[State]]) -> list[RemoteStore]:
        """Allocate the states of all stages, which are in `tables`. Raises ResourceError."""
        self._loading = (*self._loading[:-1], units)
        _all([link.call("load", *self._loading) for link in self._links])
        return [RemoteStore(self, index, table) for index, table in enumerate(tables)]

    def ready(self) -> bool:
        """Whether all stages are there; those that ended are loaded meanwhile. Raises StageLostError if that failed."""
        if self._lost is None:
            return True
        if not self._lost.done():
            return False
        self._lost.result()
        self._lost = None
        return True

    def pieces(self, rows: Sequence[PrefillRows]) -> list[list[PrefillRows]]:
        """As `pieces_of`: each stage computes one while others compute theirs."""
        return pieces_of(rows, self._piece_rows)

    def prepare(self, kind: Kind, tokens: NDArray[np.int32], step: NDArray[np.int32], *, alone: bool = True) -> _Sent:
        """Send a forward of tokens i32[m] to all stages."""
        results, step = [], step.copy()
        for index in range(len(self._links)):
            after = index + 1 < len(self._links)
            onward = Place(self._epoch, self._numbers[index + 1]) if after else None
            given = None if index else tokens
            results.append(self.send(index, "forward", kind, step, given, onward, index > 0))
        return _Sent(tuple(results))

    def run(self, prepared: _Sent) -> Any:
        """The hidden states f32[m, hidden] of a forward on the last stage's device."""
        rows: Rows = np.array(self.wait(prepared.results)[-1], np.float32)  # a copy: what arrives cannot be written
        self.transfers.rows += len(self._links) * rows.shape[0]
        self.transfers.nbytes += len(self._links) * rows.nbytes
        with self._last.errors():
            return self._arriving.put(rows)

    def run_ahead(self, pieces: Sequence[_Sent]) -> Generator[Any, None, None]:
        """As `run` for each piece in order, while the stages compute later pieces."""
        for piece in pieces:
            yield self.run(piece)

    def send(self, index: int, name: str, *arguments: Any) -> Future[Any]:
        """A call of a stage after those before it: its result, to `wait` for."""
        place = Place(self._epoch, self._numbers[index])
        self._numbers[index] += 1
        return self._links[index].call("call", place, name, arguments)

    def wait(self, results: Sequence[Future[Any]]) -> list[Any]:
        """The results of calls. Raises the first error; the calls after it are of a new epoch.

        StageLostError says that states are lost, so that nothing computed before may be continued.
        """
        try:
            while True:
                done, left = wait(results, _PING_S, FIRST_EXCEPTION)
                for one in done:
                    one.result()
                if not left:
                    return [one.result() for one in results]
                self._check_alive()
        except BaseException as error:
            self._begin_again(restores=isinstance(error, StageLostError))
            raise

    def _check_alive(self) -> None:
        """End stages that do not answer. Raises StageLostError if there is one."""
        asked = {link.call("ping"): link for link in self._links}
        _, silent = wait(asked, _SILENT_S)
        for one in silent:
            asked[one].end()
        if silent:
            names = ", ".join(sorted(asked[one].name for one in silent))
            raise StageLostError(f"{names} did not answer for {_SILENT_S:.0f} s, and was ended", next_step=_NEXT)
        _all(list(asked))

    def _begin_again(self, *, restores: bool) -> None:
        self._epoch, self._numbers = self._epoch + 1, [0] * len(self._links)
        if restores and self._lost is None:
            self._lost = Future()
            threading.Thread(target=self._restore, args=(self._lost,), name="mlcpipe-stages", daemon=True).start()

    def _restore(self, done: Future[None]) -> None:
        try:
            self._load_again()
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    def _load_again(self) -> None:
        """Load the stages that ended, each in its new process; the others keep what they have."""
        end = time.monotonic() + _BACK_S
        for link in self._links:
            while True:
                try:
                    link.call("load", *self._loading).result(max(0.0, end - time.monotonic()))
                    break
                except StageLostError as error:
                    if time.monotonic() > end:
                        raise StageLostError(f"{link.name} does not come back", found=last_line(error)) from None
                    time.sleep(_RETRY_S)
                except futures.TimeoutError:
                    found = f"nothing for {_BACK_S:.0f} s"
                    raise StageLostError(f"{link.name} does not come back", found=found) from None
                except MlcpipeError as error:
                    raise StageLostError(f"{link.name} does not load again", found=last_line(error)) from error


class RemoteStore:
    """The states of a stage elsewhere, as `StateStore` has them."""

    tensors: Any = None

    def __init__(self, stages: RemoteStages, index: int, table: Sequence[State]) -> None:
        self._stages, self._index, self.table = stages, index, tuple(table)

    def copy_pages(self, pairs: Sequence[NDArray[np.int32]]) -> None:
        """As `StateStore.copy_pages`; an error is that of the forwards that follow."""
        self._stages.send(self._index, "copy_pages", pairs)

    def read_units(self, index: int, ids: Sequence[int]) -> UnitBytes:
        """As `StateStore.read_units`."""
        (units,) = self._stages.wait([self._stages.send(self._index, "read_units", index, list(ids))])
        read: UnitBytes = units
        return read

    def write_units(self, index: int, ids: Sequence[int], units: UnitBytes) -> None:
        """As `StateStore.write_units`."""
        self._stages.wait([self._stages.send(self._index, "write_units", index, list(ids), units)])


_NEXT = "send the request again"


def _all(results: Sequence[Future[Any]]) -> list[Any]:
    """All results, or the first error in their order once all have ended."""
    wait(results)
    return [one.result() for one in results]
