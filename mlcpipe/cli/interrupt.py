"""Ctrl-C stops the answer and not the program."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class Interruptible:
    """While active, Ctrl-C before the first token raises KeyboardInterrupt; later it only sets `stopped`.

    During the prefill nobody else looks, so the exception has to reach the engine, which ends cleanly.
    Between tokens the reader of the stream looks at `stopped`, so that nothing is cut in the middle; a second
    Ctrl-C raises. Outside the main thread, where Python delivers no signals, it does nothing.
    """

    def __init__(self) -> None:
        self.stopped = False
        self._streaming = False
        self._active = threading.current_thread() is threading.main_thread()

    def streaming(self) -> None:
        """The first token is there."""
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
        if self.stopped or not self._streaming:
            raise KeyboardInterrupt
        self.stopped = True
