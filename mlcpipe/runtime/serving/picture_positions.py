"""Where RoPE has the tokens of a prompt with pictures, whose rows have a time, a row and a column (m-rope)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mlcpipe.vision.processors.picture import picture_row

if TYPE_CHECKING:
    from mlcpipe.vision.processors.picture import Picture


def moved_by(tokens: Sequence[int], pictures: Mapping[int, Picture]) -> tuple[NDArray[np.int32] | None, int]:
    """Positions i32[3, n] of the tokens up to the last one of a picture, and what is added to those of all others.

    None and 0 for pictures whose rows have positions as text, and without any. Of a picture that has lost its first
    rows (a context that was shifted) the others keep their distances.
    """
    if not pictures or min(tokens) >= 0 or all(one.positions is None for one in pictures.values()):
        return None, 0
    parts, at, next_position = list[NDArray[np.int32]](), 0, 0
    for begin, count, number, row in _runs(tokens):
        text = np.arange(next_position, next_position + begin - at, dtype=np.int32)
        next_position += len(text)
        places = pictures[number].positions
        assert places is not None
        parts += [np.broadcast_to(text, (3, len(text))), places[:, row : row + count] + np.int32(next_position)]
        next_position += pictures[number].advance
        at = begin + count
    return (np.concatenate(parts, axis=1), next_position - at) if parts else (None, 0)


def _runs(tokens: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """The parts that are rows of one picture: their begin and size, the picture's number and its first row there."""
    runs: list[tuple[int, int, int, int]] = []
    for at, token in enumerate(tokens):
        if token >= 0:
            continue
        number, row = picture_row(token)
        if runs:
            begin, count, one, first = runs[-1]
            if (at, number, row) == (begin + count, one, first + count):
                runs[-1] = begin, count + 1, one, first
                continue
        runs.append((at, 1, number, row))
    return runs
