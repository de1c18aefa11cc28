"""The calls of a stage run in the order of their numbers, with the rows of the stage before; a full queue is refused."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from mlcpipe.errors import ComputeError, ResourceError
from mlcpipe.runtime.remote.lane import Lane, Place, Rows, StageLostError

WITHIN_S = 60


@pytest.fixture
def lane() -> Iterator[Lane]:
    made = Lane("the stage", most=8)
    yield made
    made.close()


def rows(number: int) -> Rows:
    return np.full((1, 2), number, np.float32)


def value(arrived: Rows | None) -> float:
    assert arrived is not None
    return float(arrived[0, 0])


@pytest.mark.parametrize("seed", range(4))
def test_whatever_order_calls_and_rows_arrive_in(lane: Lane, seed: int) -> None:
    ran: list[tuple[int, float | None]] = []
    events = [*itertools.product(("call", "rows"), range(6))]
    random.Random(seed).shuffle(events)
    results: dict[int, Future[Any]] = {}
    for kind, number in events:
        if kind == "rows" and number % 2:
            lane.feed(Place(0, number), rows(10 * number))
        elif kind == "call":

            def work(arrived: Rows | None, number: int = number) -> int:
                ran.append((number, None if arrived is None else value(arrived)))
                return -number

            results[number] = lane.put(Place(0, number), work, fed=bool(number % 2))
    assert [results[number].result(WITHIN_S) for number in range(6)] == [0, -1, -2, -3, -4, -5]
    assert ran == [(0, None), (1, 10.0), (2, None), (3, 30.0), (4, None), (5, 50.0)]


def test_a_full_queue_is_refused_in_words(lane: Lane) -> None:
    """The calls that wait are computed afterwards; rows that nobody will take make them fail."""
    held = threading.Event()
    first = lane.put(Place(0, 0), lambda _: held.wait(WITHIN_S))
    others = [lane.put(Place(0, number), lambda _: None) for number in range(1, 8)]
    with pytest.raises(ResourceError, match="the queue of the stage is full; expected at most 8 calls that wait"):
        for number in range(8, 11):
            lane.put(Place(0, number), lambda _: None)
    with pytest.raises(ResourceError, match="came twice; found number 3"):
        lane.put(Place(0, 3), lambda _: None)
    held.set()
    assert first.result(WITHIN_S) and [one.result(WITHIN_S) for one in others] == [None] * 7
    waits = lane.put(Place(1, 0), value, fed=True)
    with pytest.raises(ResourceError, match="the queue of the stage is full"):
        lane.feed(Place(1, 999), rows(0))
    with pytest.raises(ResourceError, match="is full"):
        waits.result(WITHIN_S)


def test_an_error_ends_the_calls_after_it_until_the_next_epoch(lane: Lane) -> None:
    def fails(_: Rows | None) -> None:
        raise ComputeError("of the stage")

    several = [lane.put(Place(0, 0), lambda _: 1), lane.put(Place(0, 1), fails), lane.put(Place(0, 2), value, fed=True)]
    assert several[0].result(WITHIN_S) == 1
    for one in several[1:]:
        with pytest.raises(ComputeError, match="of the stage"):
            one.result(WITHIN_S)
    assert lane.put(Place(1, 0), lambda _: 2).result(WITHIN_S) == 2


def test_a_later_epoch_replaces_calls_and_rows(lane: Lane) -> None:
    waits = lane.put(Place(0, 0), value, fed=True)
    lane.feed(Place(0, 1), rows(1))
    lane.feed(Place(1, 0), rows(7))  # before the call of its epoch
    with pytest.raises(StageLostError, match="given up"):
        waits.result(WITHIN_S)
    lane.feed(Place(0, 0), rows(2))
    with pytest.raises(StageLostError, match="given up"):
        lane.put(Place(0, 2), lambda _: None)
    assert lane.put(Place(1, 0), value, fed=True).result(WITHIN_S) == 7


def test_the_end_gives_up_what_waits() -> None:
    lane = Lane("the stage")
    waits = lane.put(Place(0, 0), value, fed=True)
    lane.close()
    with pytest.raises(StageLostError):
        waits.result(WITHIN_S)
    with pytest.raises(StageLostError):
        lane.put(Place(0, 1), lambda _: None)
