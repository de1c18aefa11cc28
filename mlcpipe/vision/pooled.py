"""Means of patches."""

from __future__ import annotations

from tvm import te


def mean_of(x: te.Tensor, parts: int) -> te.Tensor:
    """The mean of the parts of each row, added in float32: [t, parts * n] -> [t, n]."""
    n = int(x.shape[1]) // parts
    k = te.reduce_axis((0, parts), name="k")
    total = te.compute((x.shape[0], n), lambda i, j: te.sum(x[i, k * n + j].astype("float32"), axis=k), name="total")
    return te.compute((x.shape[0], n), lambda i, j: (total[i, j] * (1.0 / parts)).astype(x.dtype), name="mean")
