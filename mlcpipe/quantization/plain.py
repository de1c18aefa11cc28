"""Unquantized weights: an array of the model's dtype."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlcpipe.quantization.limits import check_magnitude, row_chunks

Array = NDArray[Any]


def pack(w: Array, dtype: str, name: str) -> Array:
    """w float32[N, K] rounded to nearest even in `dtype`; w itself if it already has that dtype.

    Raises CheckpointError for a value that is not finite or too large for the dtype.
    """
    same = w.dtype == np.dtype(dtype)
    out = w if same else np.empty(w.shape, dtype)
    for chunk in row_chunks(*w.shape):
        check_magnitude(np.abs(w[chunk]), dtype, name)
        if not same:
            out[chunk] = w[chunk]
    return out


def error_bound(w: Array, dtype: str) -> Array:
    """Half a unit in the last place of `dtype` at |w|, float32[N, K]; 0 for float32."""
    if dtype == "float32":
        return np.zeros(w.shape, np.float32)
    # The spacing at the rounded value is that at w or, if w was rounded up to a power of two, twice it.
    # The largest number has the spacing of the number below it, but numpy returns infinity.
    below_largest = np.nextafter(np.finfo(dtype).max, np.dtype(dtype).type(0))
    ulp: Array = np.spacing(np.minimum(np.abs(w).astype(dtype), below_largest)).astype(np.float32)
    half: Array = ulp * np.float32(0.5)
    return half
