"""Group quantization one number at a time, and the inputs that the tests share."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

# name: bits, group (0: a whole row), codes a word, model dtype: written out once more, so that a slip in a scheme file shows.
GROUPED: dict[str, tuple[int, int, int, Any]] = {
    "q3f16_1": (3, 40, 10, np.float16),
    "q4f16_1": (4, 32, 8, np.float16),
    "q4f32_1": (4, 32, 8, np.float32),
    "q8f16_0": (8, 0, 4, np.float16),
    "q8f32_0": (8, 0, 4, np.float32),
    "q8f16_1": (8, 32, 4, np.float16),
    "q8f32_1": (8, 32, 4, np.float32),
}
PLAIN = ("q0f16", "q0f32")
KINDS = ("normal", "negative", "zeros", "denormal16", "denormal32", "outlier", "limit16", "ties")


def group_of(name: str, k: int) -> int:
    """Columns of a row of k elements that share a scale: a whole row is padded to a multiple of 32."""
    return GROUPED[name][1] or (k + 31) // 32 * 32


def pack_slowly(name: str, w: Array) -> tuple[Array, Array]:
    """q_weight, q_scale of w[N, K]: numpy scalars of the model's dtype and Python's integers and `round`."""
    bits, _, per_word, dtype = GROUPED[name]
    zero = 2 ** (bits - 1) - 1
    n, k = w.shape
    group = group_of(name, k)
    count = (k + group - 1) // group
    q_weight = np.zeros((n, count * group // per_word), np.uint32)
    q_scale = np.zeros((n, count), dtype)
    for row in range(n):
        for g in range(count):
            values = [dtype(v) for v in w[row, g * group : (g + 1) * group]]
            scale = max(abs(v) for v in values) / dtype(zero)
            assert scale.dtype == dtype
            q_scale[row, g] = scale
            for i, value in enumerate(values):
                code = zero
                if scale != 0:
                    code = min(max(round(float(value / scale + dtype(zero))), 0), 2 * zero)
                column = g * group + i
                q_weight[row, column // per_word] += np.uint32(code << (bits * (column % per_word)))
    return q_weight, q_scale


def make_weight(kind: str, shape: tuple[int, ...], seed: int = 0) -> Array:
    """A float32 weight of one of KINDS."""
    rng = np.random.default_rng(seed)
    w = rng.standard_normal(shape).astype(np.float32)
    if kind == "negative":
        return -np.abs(w)
    if kind == "zeros":  # all-zero groups, and -0.0 among numbers
        w[..., : (shape[-1] + 1) // 2] = 0
        w[..., ::7] = -0.0
    elif kind == "denormal16":  # scales around the smallest numbers of float16
        w *= np.float32(2.0**-22) * np.exp2(rng.integers(-4, 5, (*shape[:-1], 1))).astype(np.float32)
    elif kind == "denormal32":
        w *= np.float32(2.0**-146)
    elif kind == "outlier":
        w[..., ::33] *= 1000
    elif kind == "limit16":
        w *= 20000
        np.clip(w, -65504, 65504, out=w)
        w[..., 0] = 65504
    elif kind == "ties":  # w / scale ends in .5 exactly, with a scale of 1/4
        w = (rng.integers(-14, 15, shape) / 8).astype(np.float32)
        w[..., ::32] = 1.75
    return w
