"""A loop of answers without a thread of its own: whoever reads a token computes the next step for all readers."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager

from mlcpipe.errors import UsageError
from mlcpipe.runtime.serving.answer_loop import Answer, AnswerLoop
from mlcpipe.runtime.serving.interface import Request, TokenEvent

_HELD_S = 0.002  # until the next plan, if no answer can continue


class SharedLoop:
    """Steps a loop for the readers of its answers, in one thread or several."""

    def __init__(self, loop: AnswerLoop) -> None:
        self._loop = loop
        # Entering and leaving these is one call of C. A Condition's is several of Python: an interrupt between them, as
        # Ctrl-C may come at any, left its lock taken, and other threads waited without end.
        self._guard = threading.RLock()
        self._in_turn, self._gate = 0, threading.Lock()  # whose turn it is, the thread's number, and what ends with it
        self._unread: deque[int] = deque()  # streams that nobody reads any more

    @property
    def context_shift(self) -> bool:
        """Whether longer prompts and answers continue without dropped tokens."""
        return self._loop.context_shift

    def answer(self, request: Request) -> Answer:
        """A request as it will be computed after `begin`."""
        return self._loop.answer(request, None)

    def begin(self, answers: Iterable[Answer]) -> None:
        """Have the next step compute these answers too: of equal prompts, one is computed."""
        with self.turn():
            for answer in answers:
                self._loop.begin(answer)

    def end(self, answer: Answer) -> None:
        """End an answer that nobody reads any more; nothing happens if it has ended."""
        self._unread.append(answer.stream.id)

    def close(self) -> None:
        """End all answers; inside a turn."""
        self._loop.end_all(UsageError("the engine was closed"))

    def steps(self, answer: Answer) -> Generator[list[TokenEvent], None, None]:
        """The events of each step of a begun answer. Closing it ends the answer."""
        stream = answer.stream
        try:
            while True:
                while not stream.pending:
                    with self.turn():
                        idle = not stream.pending and not self._loop.step()
                    if idle:
                        time.sleep(_HELD_S)
                events = stream.take()
                yield events
                if events[-1].finish_reason is not None:
                    return
        finally:  # also where the garbage collector closes it, in the middle of a step
            self.end(answer)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Inside, no other thread uses the model. A thread whose turn an exception left open may enter again."""
        me, gate = threading.get_ident(), threading.Lock()
        gate.acquire()
        try:
            while not self._enter(me, gate):
                with self._gate:
                    pass
            while self._unread:
                self._loop.cancel(self._unread.popleft())
            yield
        finally:
            with self._guard:
                if self._in_turn == me:
                    self._in_turn = 0
                    self._gate.release()

    def _enter(self, me: int, gate: threading.Lock) -> bool:
        """Whether it is the turn of this thread now, which others see end by `gate`."""
        with self._guard:
            if not self._in_turn:
                self._gate, self._in_turn = gate, me
            return self._in_turn == me
