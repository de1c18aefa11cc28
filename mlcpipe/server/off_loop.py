"""Runs work in threads that would block the event loop; long work does not delay short work."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from mlcpipe.errors import MlcpipeError
from mlcpipe.server.errors import refused

_T = TypeVar("_T")
_SHORT_WORKERS = 2
LONG_BYTES = 64 << 10  # of input; up to this size, linear work takes a few milliseconds
_OVERTAKEN_BYTES_S = 8 << 20  # what waits is passed by work that is smaller by as much for each second of its wait


class OffLoop:
    """Threads that render, tokenize, and compile grammars. Of long work one is done at a time, the smallest first.

    A thread that renders keeps the interpreter from all others half of the time, so two would slow down every request.
    """

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(_SHORT_WORKERS, thread_name_prefix="mlcpipe-prompts")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="mlcpipe-long")
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []  # for their turn; by size and arrival
        self._numbers = itertools.count()
        self._busy = False

    def close(self) -> None:
        """End the threads."""
        for pool in (self._short, self._long):
            pool.shutdown(wait=False, cancel_futures=True)

    async def apart(self, work: Callable[[], _T], nbytes: int = 0) -> _T:
        """Do work on `nbytes` in a thread. Raises ApiError for the errors of mlcpipe."""
        loop = asyncio.get_running_loop()
        try:
            if nbytes <= LONG_BYTES:
                return await loop.run_in_executor(self._short, work)
            await self._turn(nbytes)
            try:
                return await loop.run_in_executor(self._long, work)
            finally:
                self._next()
        except MlcpipeError as error:
            raise refused(error) from None

    async def aside(self, work: Callable[[], _T], nbytes: int) -> _T:
        """Do work that is linear in `nbytes`, in a thread if they are many."""
        return await self.apart(work, nbytes) if nbytes > LONG_BYTES else work()

    async def _turn(self, nbytes: int) -> None:
        """Wait until this work is next; a request whose client leaves waits no longer."""
        if not self._busy:
            self._busy = True
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (time.monotonic() * _OVERTAKEN_BYTES_S + nbytes, next(self._numbers), turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it was its turn
                self._next()
            raise

    def _next(self) -> None:
        while self._waiting:
            turn = heapq.heappop(self._waiting)[2]
            if not turn.done():
                turn.set_result(None)
                return
        self._busy = False
