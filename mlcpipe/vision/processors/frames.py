"""Frames of a video, which processors make pictures of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]


@dataclass(frozen=True)
class Frames:
    """Frames uint8 [height, width, 3] of one size, each with its time, of a video of `duration_s`."""

    images: Iterator[Pixels]
    times_s: Sequence[float]
    duration_s: float
