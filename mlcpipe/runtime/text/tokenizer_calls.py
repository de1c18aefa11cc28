"""Calls into the `tokenizers` library: its panics become errors, and Ctrl-C ends the wait for long calls."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import TypeVar

from mlcpipe.errors import TokenizerError
from mlcpipe.support import env as environment

T = TypeVar("T")

environment.tokenize_in_one_thread()


def guarded(what: str, where: object, call: Callable[[], T], next_step: str | None = None) -> T:
    """Runs a call into the library; its exceptions and Rust panics become TokenizerError.

    Rust prints a panic before Python sees it. Its lines stay: file descriptor 2 belongs to the whole process.
    """
    try:
        return call()
    except BaseException as error:
        # A panic is pyo3's PanicException, a BaseException with no importable name. KeyboardInterrupt propagates.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise TokenizerError(what, where=where, found=str(error)[:200], next_step=next_step) from error
        raise


class _Worker(threading.Thread):
    """Runs calls in turn until it is told to end."""

    def __init__(self) -> None:
        super().__init__(name="tokenizer", daemon=True)
        self.calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.start()

    def run(self) -> None:
        while (call := self.calls.get()) is not None:
            call()
            del call  # which holds the text


_idle: list[_Worker] = []  # of the main thread


def interruptible(call: Callable[[], T]) -> T:
    """Runs a call that releases the GIL in a worker, so that Ctrl-C in the main thread ends the wait for it.

    The call itself continues, and its worker ends with it.
    """
    if threading.current_thread() is not threading.main_thread():
        return call()
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    worker = _idle.pop() if _idle else None
    if worker is None or not worker.is_alive():  # none is in a process that was forked
        worker = _Worker()
    try:
        worker.calls.put(run)
        while not wait((future,), 0.1).done:  # on Windows Ctrl-C waits for a lock without a timeout
            pass
    except BaseException:
        worker.calls.put(None)
        raise
    _idle.append(worker)
    return future.result()
