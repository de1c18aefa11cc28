"""Decode steps as CUDA graphs: what TVM launches for a step is recorded once, and launched as a whole from then on.

Some hundred launches of a few microseconds each are as long as a small model's arithmetic; a graph is one launch. Only
numbers may differ between steps: they are copied to where the recorded kernels read them. What else a step depends on
is its key; where that changes the step is recorded again, and the graph's launches are replaced.
CUDA runtime API, "Graph Management" and "Stream Management", https://docs.nvidia.com/cuda/cuda-runtime-api
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import tvm_ffi

from mlcpipe.runtime.turns import turns

_NON_BLOCKING = 1  # cudaStreamNonBlocking
_RELAXED = 2  # cudaStreamCaptureModeRelaxed: a pool may take memory meanwhile
_DEFAULT_STREAM = None
_MOST_FAILURES = 3
Work = Callable[[], Any]


class GraphError(RuntimeError):
    """A step cannot be recorded: the reason in CUDA's words."""


@dataclass(frozen=True)
class Cudart:
    """CUDA's runtime library."""

    library: Any

    def call(self, name: str, *arguments: Any) -> None:
        """Raises GraphError with the name of the error."""
        if (failed := getattr(self.library, name)(*arguments)) == 0:
            return
        self.library.cudaGetLastError()  # which others would take for theirs
        words = self.library.cudaGetErrorString
        words.restype = ctypes.c_char_p
        raise GraphError(f"CUDA's {name}: {(words(failed) or b'').decode()}")


class Graph:
    """The launches of one step, on one device."""

    def __init__(self, cudart: Cudart, index: int) -> None:
        self._cudart, self._index = cudart, index
        self._stream, self._executable = ctypes.c_void_p(), ctypes.c_void_p()

    def record(self, work: Work) -> Any:
        """What `work` gives; nothing of it is computed before `launch`. Raises GraphError, and what `work` raises."""
        call = self._cudart.call
        call("cudaSetDevice", self._index)
        if not self._stream:
            call("cudaStreamCreateWithFlags", ctypes.byref(self._stream), _NON_BLOCKING)
        graph = ctypes.c_void_p()
        call("cudaStreamBeginCapture", self._stream, _RELAXED)
        try:
            with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", self._index), self._stream.value or 0):
                made = work()
        except BaseException:
            self._cudart.library.cudaStreamEndCapture(self._stream, ctypes.byref(graph))
            self._cudart.library.cudaGetLastError()
            if graph:
                self._cudart.library.cudaGraphDestroy(graph)
            raise
        call("cudaStreamEndCapture", self._stream, ctypes.byref(graph))
        try:
            self._replace(graph)
        finally:
            call("cudaGraphDestroy", graph)
        return made

    def _replace(self, graph: ctypes.c_void_p) -> None:
        """Make what was recorded what is launched: by an update, where only arguments and grids are others."""
        information = (ctypes.c_uint64 * 4)()  # cudaGraphExecUpdateResultInfo, of three words
        if self._executable:
            if self._cudart.library.cudaGraphExecUpdate(self._executable, graph, information) == 0:
                return
            self._cudart.library.cudaGetLastError()
            self._drop()
        self._cudart.call("cudaGraphInstantiate", ctypes.byref(self._executable), graph, ctypes.c_ulonglong(0))

    def launch(self) -> None:
        """Compute the step, after all that the device's default stream has to do. Raises GraphError."""
        self._cudart.call("cudaSetDevice", self._index)
        self._cudart.call("cudaGraphLaunch", self._executable, _DEFAULT_STREAM)

    def _drop(self) -> None:
        if self._executable:
            self._cudart.library.cudaGraphExecDestroy(self._executable)
            self._executable = ctypes.c_void_p()

    def close(self) -> None:
        """Give back what it took of the device."""
        self._drop()
        if self._stream:
            self._cudart.library.cudaStreamDestroy(self._stream)
            self._stream = ctypes.c_void_p()


class Steps:
    """Steps of one model: recorded as soon as two follow one another, launched as graphs while nobody else has a turn.

    `problem` says why they are launched kernel by kernel, "" while they need not be.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph, self._turns = graph, turns()
        self._key: Hashable = None
        self._made: Any = None
        self._failures = 0
        self.problem = ""

    def run(self, key: Hashable, work: Work) -> Any:
        """What `work` gives, computed; good until the next step. `key`: all that its launches depend on."""
        with self._turns.lock:
            if self.problem or self._turns.last is not self:
                return self._plain(work, self)
            if self._made is None or key != self._key:
                self._made = None  # whose memory may serve this step
                self._made = self._recorded(work)
                self._key = key
                if self._made is None:
                    return self._plain(work, self)
            self._graph.launch()
            return self._made

    def other(self, work: Work) -> Any:
        """What `work` gives, which is no step: it may take memory, and give it back."""
        with self._turns.lock:
            return self._plain(work, None)

    def beside(self, work: Work) -> Any:
        """What `work` gives, which takes what memory it took at the step before."""
        with self._turns.lock:
            if self._turns.last is not self:
                self._turns.last = None
            return work()

    def close(self) -> None:
        """Forget the graph."""
        with self._turns.lock:
            self._made = None
            self._graph.close()

    def _plain(self, work: Work, last: object) -> Any:
        self._made, self._turns.last = None, last
        return work()

    def _recorded(self, work: Work) -> Any:
        """None where that fails, or others had a turn meanwhile."""
        try:
            made = self._graph.record(work)
        except (RuntimeError, MemoryError) as error:  # GraphError, or TVM's of a launch that cannot be recorded
            self._failures += 1
            if self._failures == _MOST_FAILURES:
                self.problem = (str(error).strip().splitlines() or [type(error).__name__])[-1][:300]
                warnings.warn(f"no CUDA graphs, steps launch kernel by kernel: {self.problem}", stacklevel=2)
            return None
        self._failures = 0
        return made if self._turns.last is self else None
