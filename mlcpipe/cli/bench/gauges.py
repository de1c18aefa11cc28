"""Gauges of `bench` while an engine works: memory bandwidth, and memory in use."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from types import TracebackType
from typing import TYPE_CHECKING

from mlcpipe.host.bandwidth import read_bandwidth_gb_s
from mlcpipe.host.memory import private_memory_bytes

if TYPE_CHECKING:
    from mlcpipe import Engine


class BandwidthProbe:
    """Measures the read bandwidth on demand; all `readings` in GB/s of 10^9 bytes.

    In a process of its own, so that the buffer does not count as the engine's memory.
    """

    def __init__(self, threads: int) -> None:
        self.readings: list[float] = []
        self._threads = threads
        self._pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))

    def __enter__(self) -> BandwidthProbe:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown()

    def read(self) -> float:
        """Measure now."""
        self.readings.append(self._pool.submit(read_bandwidth_gb_s, self._threads).result())
        return self.readings[-1]


class MemoryGauge:
    """Keeps the peak of private memory, and how much of it was KV cache; bytes."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._deepest = 0
        self.private: int | None = None
        self.kv = 0

    def read(self, tokens: int) -> None:
        """Read it now, after a measurement whose longest sequence had `tokens` tokens."""
        if tokens <= self._engine.context_length:
            self._deepest = max(self._deepest, tokens)
        private = private_memory_bytes()
        if private is not None and private > (self.private or 0):
            self.private = private
            self.kv = self._deepest * self._engine.manifest.kv_bytes_per_token
