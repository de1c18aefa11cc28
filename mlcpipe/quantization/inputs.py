"""Statistics of the rows that a matrix multiplies, from a calibration text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

_LEAST = 1e-4  # of the mean importance, so that columns which a short text never uses still count


@dataclass(frozen=True, eq=False)
class Inputs:
    """Statistics of the rows x[n, K] of y = x w^T, float32.

    `mean_square` and `peak` are [K]: the means of x^2 and the largest |x|. `gram` is the mean of x^T x, [K, K], for
    methods that need it, `rows` are some of them, [m, K].
    """

    mean_square: Array
    peak: Array
    gram: Array | None = None
    rows: Array | None = None

    def importance(self) -> Array:
        """The weight of an error in each column, float32[K], mean 1; all 1 for a matrix without rows."""
        mean = float(self.mean_square.mean())
        if not mean > 0:
            return np.ones_like(self.mean_square)
        found: Array = np.maximum(self.mean_square / np.float32(mean), np.float32(_LEAST))
        return found

    def scaled(self, factors: Array) -> Inputs:
        """Those of x * factors, float32[K]."""
        gram = None if self.gram is None else self.gram * factors * factors[:, None]
        rows = None if self.rows is None else self.rows * factors
        return Inputs(self.mean_square * factors**2, self.peak * np.abs(factors), gram, rows)


def importance_of(inputs: Inputs | None, k: int, padded: int, size: int) -> Array:
    """The importance of columns as search kernels take it: float32[padded / size, size]; [1, size] of 1 without inputs.

    Columns from k on are padding, whose numbers are 0, so their importance has no effect.
    """
    if inputs is None:
        return np.ones((1, size), np.float32)
    found = np.ones(padded, np.float32)
    found[:k] = inputs.importance()
    return found.reshape(-1, size)
