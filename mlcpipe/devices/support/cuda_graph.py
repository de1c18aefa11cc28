"""Decode steps as CUDA graphs: TVM's launches of a step are recorded once and then launched as a whole.

Some hundred launches of a few microseconds each take as long as a small model's arithmetic; a graph is one launch.
Steps may differ only in numbers, which are copied to the addresses that the recorded kernels read. All else that a step
depends on is its key: when that changes, the step is recorded again and replaces the graph's launches.
CUDA runtime API, "Graph Management" and "Stream Management", https://docs.nvidia.com/cuda/cuda-runtime-api
"""

from __future__ import annotations

import ctypes
import functools
import threading
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tvm_ffi

from mlcpipe.devices.support.step_recorder import StepRecorder
from mlcpipe.errors import last_line

_NON_BLOCKING = 1  # cudaStreamNonBlocking
_RELAXED = 2  # cudaStreamCaptureModeRelaxed: a pool may take memory meanwhile
_DEFAULT_STREAM = None
_MAX_FAILURES = 3
Work = Callable[[], Any]


class GraphError(RuntimeError):
    """A step cannot be recorded, with CUDA's name of the error."""


@dataclass(frozen=True)
class Cudart:
    """CUDA's runtime library."""

    library: Any

    def call(self, name: str, *arguments: Any) -> None:
        """Raises GraphError with the name of the error."""
        if (failed := getattr(self.library, name)(*arguments)) == 0:
            return
        self.library.cudaGetLastError()  # else other code would see it as its own error
        words = self.library.cudaGetErrorString
        words.restype = ctypes.c_char_p
        raise GraphError(f"CUDA's {name}: {(words(failed) or b'').decode()}")


class Graph:
    """The launches of one step, on one device."""

    def __init__(self, cudart: Cudart, index: int) -> None:
        self._cudart, self._index = cudart, index
        self._stream, self._executable = ctypes.c_void_p(), ctypes.c_void_p()

    def record(self, work: Work) -> Any:
        """The result of `work`, which is not computed before `launch`. Raises GraphError, and what `work` raises."""
        call = self._cudart.call
        call("cudaSetDevice", self._index)
        if not self._stream:
            call("cudaStreamCreateWithFlags", ctypes.byref(self._stream), _NON_BLOCKING)
        graph = ctypes.c_void_p()
        call("cudaStreamBeginCapture", self._stream, _RELAXED)
        try:
            with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", self._index), self._stream.value or 0):
                result = work()
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
        return result

    def _replace(self, graph: ctypes.c_void_p) -> None:
        """Install a recorded graph, by an update if only arguments or grid sizes changed."""
        information = (ctypes.c_uint64 * 4)()  # cudaGraphExecUpdateResultInfo, of three words
        if self._executable:
            if self._cudart.library.cudaGraphExecUpdate(self._executable, graph, information) == 0:
                return
            self._cudart.library.cudaGetLastError()
            self._drop()
        self._cudart.call("cudaGraphInstantiate", ctypes.byref(self._executable), graph, ctypes.c_ulonglong(0))

    def launch(self) -> None:
        """Compute the step, after all earlier work on the device's default stream. Raises GraphError."""
        self._cudart.call("cudaSetDevice", self._index)
        self._cudart.call("cudaGraphLaunch", self._executable, _DEFAULT_STREAM)

    def _drop(self) -> None:
        if self._executable:
            self._cudart.library.cudaGraphExecDestroy(self._executable)
            self._executable = ctypes.c_void_p()

    def close(self) -> None:
        """Free the graph and its stream."""
        self._drop()
        if self._stream:
            self._cudart.library.cudaStreamDestroy(self._stream)
            self._stream = ctypes.c_void_p()


class _AllocationGuard:
    """Serializes work on CUDA devices, and records who last allocated from the pools of TVM's virtual machines.

    A graph writes to the addresses it was recorded with, which these pools count as free between steps. So it may be
    launched only while no other code allocates or frees memory.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.last: object = None


@functools.cache
def _allocation_guard() -> _AllocationGuard:
    """One for this process, whose devices share the pools."""
    return _AllocationGuard()


@contextmanager
def foreign_allocation() -> Iterator[None]:
    """For other code that changes the pools: recorded steps wait meanwhile, and are recorded again."""
    guard = _allocation_guard()
    with guard.lock:
        guard.last = None
        yield


class GraphRecorder(StepRecorder):
    """Records a step as a graph when two steps follow one another, then launches it while the key is unchanged.

    After another allocation the next step launches kernel by kernel, and after `_MAX_FAILURES` failed recordings in a
    row all do.
    """

    def __init__(self, graph: Graph, *, enabled: bool) -> None:
        self._graph, self._enabled = graph, enabled
        self._guard = _allocation_guard()
        self._key: Hashable = None
        self._result: Any = None
        self._failures = 0

    def run(self, work: Work, key: Hashable = None) -> Any:
        with self._guard.lock:
            if key is None:
                return self._launch_kernels(work, None)
            if not self._enabled or self._guard.last is not self:
                return self._launch_kernels(work, self)
            if self._result is None or key != self._key:
                self._result = None  # whose memory may serve this step
                self._result, self._key = self._record(work), key
                if self._result is None:
                    return self._launch_kernels(work, self)
            self._graph.launch()
            return self._result

    def close(self) -> None:
        with self._guard.lock:
            self._result = None
            self._graph.close()

    def _launch_kernels(self, work: Work, allocator: object) -> Any:
        self._result, self._guard.last = None, allocator
        return work()

    def _record(self, work: Work) -> Any:
        """The result of a step, not yet computed; None if recording fails, or memory was freed meanwhile."""
        try:
            result = self._graph.record(work)
        except (RuntimeError, MemoryError) as error:  # GraphError, or TVM's for a launch that cannot be recorded
            self._failures += 1
            if self._failures == _MAX_FAILURES:
                self._enabled = False
                warnings.warn(f"no CUDA graphs, steps launch kernel by kernel: {last_line(error)}", stacklevel=2)
            return None
        self._failures = 0
        return result if self._guard.last is self else None
