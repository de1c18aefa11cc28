"""Runs work in threads that would block the event loop; long work does not delay short work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from mlcpipe.errors import MlcpipeError
from mlcpipe.server.errors import refused

_T = TypeVar("_T")
_WORKERS = 2  # threads for short work, and as many for long work
LONG_BYTES = 64 << 10  # of input; up to this size, linear work takes a few milliseconds


class OffLoop:
    """Threads that render, tokenize, and compile grammars."""

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(_WORKERS, thread_name_prefix="mlcpipe-prompts")
        self._long = ThreadPoolExecutor(_WORKERS, thread_name_prefix="mlcpipe-long")

    def close(self) -> None:
        """End the threads."""
        for pool in (self._short, self._long):
            pool.shutdown(wait=False, cancel_futures=True)

    async def apart(self, work: Callable[[], _T], nbytes: int = 0) -> _T:
        """Do work on `nbytes` in a thread. Raises ApiError for the errors of mlcpipe."""
        pool = self._long if nbytes > LONG_BYTES else self._short
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, work)
        except MlcpipeError as error:
            raise refused(error) from None

    async def aside(self, work: Callable[[], _T], nbytes: int) -> _T:
        """Do work that is linear in `nbytes`, in a thread if they are many."""
        return await self.apart(work, nbytes) if nbytes > LONG_BYTES else work()
