"""Requests that wait for pages and a place, by class and age."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator

from mlcpipe.runtime.serving.sequence import PRIORITIES, Sequence, State

AGING_S = 5.0  # of waiting raise the level by a class


def level(sequence: Sequence, now: float) -> int:
    """The class of a waiting sequence, raised by its age."""
    return sequence.request.priority + int((now - sequence.request.arrival) / AGING_S)


class WaitingQueue:
    """A list per class, in order of arrival, along which the level never rises: merging the lists sorts all."""

    def __init__(self) -> None:
        self._classes: dict[int, list[Sequence]] = {priority: [] for priority in PRIORITIES}

    def __len__(self) -> int:
        return sum(map(len, self._classes.values()))

    def __iter__(self) -> Iterator[Sequence]:
        for sequences in self._classes.values():
            yield from sequences

    def add(self, sequence: Sequence) -> None:
        """Insert by arrival."""
        insort(self._classes[sequence.request.priority], sequence, key=order)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence of the queue."""
        remove(self._classes[sequence.request.priority], sequence)

    def by_level(self, now: float, prefilling: Iterable[Sequence]) -> Iterator[Sequence]:
        """All waiting and prefilling sequences: by level, then prefilling ones first, then by arrival."""

        def key(sequence: Sequence) -> tuple[int, bool, float, int]:
            request = sequence.request
            return (-level(sequence, now), sequence.state is State.WAITING, request.arrival, sequence.id)

        return heapq.merge(sorted(prefilling, key=key), *self._classes.values(), key=key)


def remove(ordered: list[Sequence], sequence: Sequence) -> None:
    """Remove from a list in the order of `Sequence.order`."""
    at = bisect_left(ordered, order(sequence), key=order)
    assert ordered[at] is sequence
    del ordered[at]


def order(sequence: Sequence) -> tuple[int, float, int]:
    """`Sequence.order` as a key."""
    return sequence.order
