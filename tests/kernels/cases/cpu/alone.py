"""Rows alone and among others: a kernel for few rows, or for many, must give each the same bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tests.kernels.cases.cpu.int8 import Int8ExpertMatmul, Int8Matmul
from tests.kernels.cases.cpu.matmul import ExpertMatmul, Matmul, packed
from tests.kernels.harness import Array, adversarial, unwritten

# Panels of 2, 3, 4, 6, 12 and 16 rows, their tails, and what was once a limit between two kinds of arithmetic.
ROWS = (2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 63, 64, 65, 128)
Product = Matmul | Int8Matmul
Experts = ExpertMatmul | Int8ExpertMatmul
# call(arguments of each call) -> the last argument of each after it
Run = Callable[[Sequence[tuple[Array, ...]]], Sequence[Any]]


def assert_rows_are_as_alone(kernel: Product | Experts, run: Run) -> None:
    """Every row of calls with ROWS rows has the bits that it has alone."""
    experts = isinstance(kernel, Experts)
    shape = (kernel.experts, kernel.n, kernel.k) if isinstance(kernel, Experts) else (kernel.n, kernel.k)
    arrays = packed(kernel.scheme, shape, "normal")[0]
    rng = np.random.default_rng(9)
    top = kernel.top if isinstance(kernel, Experts) else 1
    x_rows = top if isinstance(kernel, Experts) and not kernel.shared else 1
    x = adversarial("outlier", (max(ROWS) * x_rows, kernel.k), rng)
    ids = rng.integers(0, shape[0], (max(ROWS), top)).astype(np.int32)
    n = kernel.n // 2 if isinstance(kernel, Product) and kernel.activation else kernel.n

    def arguments(first: int, end: int) -> tuple[Array, ...]:
        chosen = (ids[first:end],) if experts else ()
        return (x[first * x_rows : end * x_rows], *arrays, *chosen, unwritten(((end - first) * top, n)))

    alone = run([arguments(i, i + 1) for i in range(max(ROWS))])
    expected = np.concatenate([np.asarray(y) for y in alone])
    assert np.isfinite(expected).all() and len(np.unique(expected, axis=0)) > len(expected) // 2
    for m, found in zip(ROWS, run([arguments(0, m) for m in ROWS])):
        np.testing.assert_array_equal(found, expected[: m * top], err_msg=f"{m} rows")
