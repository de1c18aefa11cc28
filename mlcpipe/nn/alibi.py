"""ALiBi (Press et al. 2022): scores lose slope * distance, with the kernels of attention without it.

slope * (j - i) and slope * j differ by a constant of the query i, which softmax ignores. So two more dimensions of each
head do it: those of q are slope * 64 and slope, those of k are j // 64 and j % 64, which float16 holds exactly up to
2048 * 64 positions. v has zeros there, and so has the output.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tvm import te, tirx
from tvm.relax.frontend.nn import Tensor, op

from mlcpipe.nn.attention_spec import SLOPE_DIMS

_STEP = 64
Pair = Callable[..., tuple[Any, Any]]


def slopes_of(heads: int) -> tuple[float, ...]:
    """2 ** (-8 i / n) for i = 1 ... n, where n is the power of two from `heads` on; those of even i first if it is not
    `heads`.
    """
    n = 2 ** math.ceil(math.log2(heads))
    found = [2.0 ** (-8 * i / n) for i in range(1, n + 1)]
    return tuple(found if n == heads else [*found[1::2], *found[::2]][:heads])


def with_slopes(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, slopes: Sequence[float], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v [m, heads, D] of rows at `positions` i32[m] -> [m, heads, D + SLOPE_DIMS]; `scale` multiplies scores."""
    table = Tensor.from_const(np.array(slopes, np.float32) / np.float32(scale))
    wide_q = _wider(q, lambda i, h, of: (of[h] * tirx.const(_STEP, "float32"), of[h]), table)
    wide_k = _wider(k, lambda i, h, at: (tirx.floordiv(at[i], _STEP), tirx.floormod(at[i], _STEP)), positions)
    return wide_q, wide_k, _wider(v, lambda i, h: (tirx.const(0, "int32"), tirx.const(0, "int32")))


def without_slopes(y: Tensor, heads: int) -> Tensor:
    """y [m, heads * (D + SLOPE_DIMS)] -> [m, heads * D]."""
    wide = int(y.shape[1]) // heads
    size = wide - SLOPE_DIMS
    return op.tensor_expr_op(
        lambda a: te.compute((a.shape[0], heads * size), lambda i, j: a[i, j // size * wide + j % size], name="heads"),
        "heads",
        [y],
    )


def _wider(x: Tensor, pair: Pair, *others: Tensor) -> Tensor:
    """x [m, heads, D] with two dimensions of `pair(i, h, *others)`, then zeros."""

    def wide(a: te.Tensor, *tensors: te.Tensor) -> te.Tensor:
        size = a.shape[2]

        def element(i: tirx.Var, h: tirx.Var, d: tirx.Var) -> tirx.PrimExpr:
            first, second = (one.astype(a.dtype) for one in pair(i, h, *tensors))
            rest = tirx.if_then_else(d == size + 1, second, tirx.const(0, a.dtype))
            return tirx.if_then_else(d < size, a[i, h, d], tirx.if_then_else(d == size, first, rest))

        return te.compute((*a.shape[:2], size + SLOPE_DIMS), element, name="wider")

    return op.tensor_expr_op(wide, "wider", [x, *others])
