"""Ctrl-C stops the answer, not the program."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType


class Interrupts:
    """Ctrl-C in a conversation: noted, and raised as KeyboardInterrupt only in `raised()`, once.

    So a second one, pressed before the first was handled, cannot end the program.
    """

    def __init__(self) -> None:
        self._noted = False
        self._raises = False

    def forget(self) -> None:
        """Forget a noted Ctrl-C: it was not about what follows."""
        self._noted = False

    @contextmanager
    def noted(self) -> Iterator[None]:
        """While active, Ctrl-C is only noted; outside the main thread there are no signals."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGINT, self._on_signal)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    @contextmanager
    def raised(self) -> Iterator[None]:
        """While active, Ctrl-C raises KeyboardInterrupt, also one noted before."""
        self._raises = True
        try:
            if self._noted:
                raise KeyboardInterrupt
            yield
        finally:
            self._raises = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._noted = True
        if self._raises:
            self._raises = False
            raise KeyboardInterrupt


class Interruptible:
    """While active, Ctrl-C before the first token raises KeyboardInterrupt; later it only sets `stopped`.

    During prefill only the exception reaches the engine, which ends cleanly. Between tokens the reader of the stream
    checks `stopped`, so that nothing is cut in the middle; a second Ctrl-C raises. It raises once: another would cut
    the end of the answer. Outside the main thread, where Python delivers no signals, it does nothing.
    """

    def __init__(self) -> None:
        self.stopped = False
        self._streaming = False
        self._raised = False
        self._active = threading.current_thread() is threading.main_thread()

    def streaming(self) -> None:
        """The first token has arrived."""
        self._streaming = True

    def __enter__(self) -> Interruptible:
        if self._active:
            self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._active:
            signal.signal(signal.SIGINT, self._before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if (self.stopped or not self._streaming) and not self._raised:
            self._raised = True
            raise KeyboardInterrupt
        self.stopped = True
