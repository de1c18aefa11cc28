"""Checks that a weight fits its dtype, and the chunk size for processing weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlcpipe.errors import CheckpointError

Array = NDArray[Any]


def row_chunks(rows: int, k: int) -> Iterator[slice]:
    """Slices of rows of about 2^17 elements: 512 KiB of float32, so that temporaries stay in the L2 cache."""
    step = max(1, (1 << 17) // k)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def check_magnitude(peaks: Array, dtype: str, name: str) -> None:
    """Raise CheckpointError unless the magnitudes `peaks` (float32) are finite and fit the dtype."""
    largest = float(np.finfo(dtype).max)
    peak = float(peaks.max())  # np.max propagates NaN, and every comparison with NaN is false
    if peak <= largest:
        return
    if not np.isfinite(peak):
        raise CheckpointError(
            f"tensor {name} is not finite",
            expected="finite numbers",
            found=peak,
            next_step="the checkpoint is broken: download it again",
        )
    raise CheckpointError(
        f"tensor {name} does not fit {dtype}",
        expected=f"|w| <= {largest:g}",
        found=f"{peak:g}",
        next_step="choose a quantization with float32, such as q4f32_1 or q0f32",
    )
