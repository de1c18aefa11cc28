"""The integers of steps for kernel cases (`tir_schedules/step_layout.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tir_schedules import step_layout as s
from tir_schedules.paged import Heads

Array = NDArray[Any]


class Rows(Protocol):
    """Rows begin ... end - 1 of a sequence."""

    @property
    def begin(self) -> int: ...

    @property
    def end(self) -> int: ...


def step_integers(
    window: int, parts: Sequence[Rows], slots: Array, table_begin: Array, ids: Array, draw: np.random.Generator
) -> Array:
    """The integers of a step, its arrays in any order and with gaps. A layer with a window has pages of group 1."""
    row_begin = np.cumsum([0, *(part.end - part.begin for part in parts)])
    nowhere = np.full(len(ids), -1)
    arrays = {
        s.POSITION: np.concatenate([np.arange(part.begin, part.end) for part in parts]),
        s.PLACE: slots if not window else np.zeros(len(slots)),
        s.ROW_BEGIN: row_begin,
        s.KEYS: np.array([part.end for part in parts]),
        s.TABLE_BEGIN: table_begin,
        s.TABLES: nowhere if window else ids,
        s.ROPE_LENGTH: np.zeros(row_begin[-1]),
        s.TABLES + 1: ids if window else nowhere,
        s.SEQUENCE: np.repeat(np.arange(len(parts)), np.diff(row_begin)),
    }
    numbers = [np.zeros(s.HEADER)]
    numbers[0][[s.SEQUENCES, s.ROWS]] = len(parts), row_begin[-1]
    at = s.HEADER
    for key in draw.permutation(list(arrays)):
        numbers[0][key] = at
        numbers += [arrays[key], np.full(int(draw.integers(3)), 10**9)]
        at += sum(map(len, numbers[-2:]))
    return np.concatenate(numbers).astype(np.int32)


def sinks_of(shape: Heads) -> Array:
    """Logits of the sinks of heads, float64: from none to far above all scores; none where heads have no sinks."""
    if not shape.sinks:
        return np.full(shape.num_heads, -np.inf)
    return np.resize(np.array([3.0, -1.0, 300.0, 0.5, -300.0]), shape.num_heads)
