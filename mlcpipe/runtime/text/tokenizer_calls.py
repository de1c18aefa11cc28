"""Calls into the `tokenizers` library: its panics become errors, and Ctrl-C ends the wait for one that takes long."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from mlcpipe import env as environment
from mlcpipe.errors import TokenizerError

T = TypeVar("T")

environment.tokenize_in_one_thread()


def guarded(what: str, where: object, call: Callable[[], T]) -> T:
    """Runs a call into the library; its exceptions and Rust panics become TokenizerError.

    Rust prints a panic before Python sees it. Its lines stay: file descriptor 2 belongs to the whole process.
    """
    try:
        return call()
    except BaseException as error:
        # A panic is pyo3's PanicException, a BaseException with no importable name. KeyboardInterrupt goes on.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise TokenizerError(what, where=where, found=str(error)[:200]) from error
        raise


def interruptible(call: Callable[[], T]) -> T:
    """Runs a call that lets go of the interpreter in a thread of its own. Ctrl-C ends the wait; the call goes on."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=run, name="tokenizer", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.1)  # on Windows Ctrl-C waits for a lock without a timeout
    return future.result()
