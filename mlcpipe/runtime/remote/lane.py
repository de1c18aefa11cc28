"""The work of one stage in order: calls by number, each after the rows of the stage before, on one thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mlcpipe.errors import MlcpipeError, ResourceError

Rows = NDArray[np.float32]
Work = Callable[["Rows | None"], Any]
MOST_WAITING = 32  # calls: a step has a forward of answers, up to 4 pieces of prompts, and copies of pages


class StageLostError(MlcpipeError):
    """A stage on another machine has ended or does not answer; its states are lost."""


class Place(NamedTuple):
    """Where a call stands in a lane: numbers count from 0 in each epoch, and a later epoch replaces the ones before."""

    epoch: int
    number: int


class _Waiting(NamedTuple):
    work: Work
    fed: bool
    done: Future[Any]


class Lane:
    """Runs calls in the order of their numbers, whatever order they arrive in.

    After a call that failed, all later ones of its epoch fail with the same error: they would continue from states that
    are wrong.
    """

    def __init__(self, name: str, most: int = MOST_WAITING) -> None:
        self._name, self._most = name, most
        self._changed = threading.Condition()
        self._epoch, self._next = -1, 0
        self._waiting: dict[int, _Waiting] = {}
        self._rows: dict[int, Rows] = {}
        self._broken: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"mlcpipe-{name}", daemon=True)
        self._thread.start()

    def put(self, place: Place, work: Work, *, fed: bool = False) -> Future[Any]:
        """Queue `work`; if `fed`, until the rows of its place arrive, which it gets.

        Raises ResourceError where too many calls wait, and StageLostError for one of an earlier epoch.
        """
        with self._changed:
            self._enter(place)
            if place.epoch < self._epoch or self._closed:
                raise _replaced(self._name)
            if place.number < self._next or place.number in self._waiting:
                raise ResourceError(f"a call of {self._name} came twice", found=f"number {place.number}")
            self._check_room(place, len(self._waiting))
            done: Future[Any] = Future()
            self._waiting[place.number] = _Waiting(work, fed, done)
            self._changed.notify_all()
            return done

    def feed(self, place: Place, rows: Rows) -> None:
        """The rows for a call, from the stage before. Those of an earlier epoch are dropped.

        Raises ResourceError where too many wait; the calls of the epoch then fail, as one of them lacks its rows.
        """
        with self._changed:
            self._enter(place)
            if place.epoch < self._epoch or place.number < self._next:
                return
            try:
                self._check_room(place, len(self._rows))
            except ResourceError as error:
                self._broken = self._broken or error
                raise
            else:
                self._rows[place.number] = rows
            finally:
                self._changed.notify_all()

    def close(self) -> None:
        """End the thread after the call that runs; calls that wait fail."""
        with self._changed:
            self._closed = True
            self._drop()
            self._changed.notify_all()
        self._thread.join()

    def _enter(self, place: Place) -> None:
        """Begin the epoch of a place if it is a later one."""
        if place.epoch > self._epoch:
            self._drop()
            self._epoch, self._next, self._broken = place.epoch, 0, None

    def _drop(self) -> None:
        waiting, self._waiting, self._rows = self._waiting, {}, {}
        for one in waiting.values():
            one.done.set_exception(_replaced(self._name))

    def _check_room(self, place: Place, count: int) -> None:
        if count >= self._most or place.number >= self._next + 2 * self._most:
            raise ResourceError(
                f"the queue of {self._name} is full", expected=f"at most {self._most} calls that wait",
                found=f"call {place.number} while number {self._next} is next",
            )  # fmt: skip

    def _take(self) -> tuple[_Waiting, Rows | None, int, BaseException | None] | None:
        """The next call, once it can run; None at the end."""
        with self._changed:
            while not self._closed:
                one = self._waiting.get(self._next)
                if one is not None and (not one.fed or self._next in self._rows or self._broken is not None):
                    del self._waiting[self._next]
                    rows = self._rows.pop(self._next, None)
                    self._next += 1
                    return one, rows, self._epoch, self._broken
                self._changed.wait()
            return None

    def _run(self) -> None:
        while (taken := self._take()) is not None:
            one, rows, epoch, broken = taken
            try:
                if broken is not None:
                    raise broken
                result = one.work(rows)
            except BaseException as error:
                with self._changed:
                    if epoch == self._epoch:
                        self._broken = error
                one.done.set_exception(error)
            else:
                one.done.set_result(result)


def _replaced(name: str) -> StageLostError:
    return StageLostError(f"a call of {name} was given up", found="a later start, or the end, of its stage")
