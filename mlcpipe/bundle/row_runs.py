"""Orders of rows in a few numbers: runs, each a first row, a count and a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Run = tuple[int, ...]
MAX_ROWS = 1 << 24


def runs_of(order: NDArray[np.int32]) -> tuple[Run, ...]:
    """The runs that one after the other are an order, each as long as possible."""
    steps, runs, begin = np.diff(order), list[Run](), 0
    while begin < len(order):
        step = int(steps[begin]) if begin < len(steps) else 1
        others = np.flatnonzero(steps[begin:] != step)
        count = int(others[0]) + 1 if len(others) else len(order) - begin
        runs.append((int(order[begin]), count, step))
        begin += count
    return tuple(runs)


def order_of(runs: Sequence[Run], columns: Sequence[int]) -> NDArray[np.int64]:
    """The order int64[n] of rows of parts that lie one after the other; without runs it is their own.

    Raises ValueError unless it is an order of each part.
    """
    rows = np.arange(sum(columns))
    if not runs:
        return rows
    if sum(count for _, count, _ in runs) != len(rows) or min(count for _, count, _ in runs) < 1:
        raise ValueError(f"the rows are not {len(rows)}")
    order = np.concatenate([first + step * np.arange(count) for first, count, step in runs])
    begin = 0
    for count in columns:
        if not np.array_equal(np.sort(order[begin : begin + count]), rows[begin : begin + count]):
            raise ValueError(f"the rows from {begin} on are no order of a part")
        begin += count
    return order
