"""Selects, joins, slices and scales rows of hidden states."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import te, tirx
from tvm.relax.frontend.nn import Tensor, op

from tir_schedules.op import tag


def rows_of(x: te.Tensor, indices: te.Tensor) -> te.Tensor:
    """x [m, hidden], indices i32[b] -> [b, hidden]; an out-of-range index reads the nearest row."""

    def row(i: tirx.Var) -> tirx.PrimExpr:
        return tirx.min(tirx.max(indices[i].astype("int64"), tirx.const(0, "int64")), x.shape[0] - 1)

    return te.compute((indices.shape[0], x.shape[1]), lambda i, j: x[row(i), j], name="rows")


def rows_instead(x: te.Tensor, others: te.Tensor, places: te.Tensor) -> te.Tensor:
    """x [m, hidden], where places i32[m] is not negative row places[i] of `others` f32[e, hidden], at most the last."""

    def element(i: tirx.Var, j: tirx.Var) -> tirx.PrimExpr:
        at = tirx.max(tirx.min(places[i].astype("int64"), others.shape[0] - 1), 0)
        return tirx.if_then_else(places[i] < 0, x[i, j], others[at, j].astype(x.dtype))

    return te.compute(x.shape, element, name="rows_instead")


def rows_added(x: te.Tensor, others: te.Tensor, places: te.Tensor, begin: int) -> te.Tensor:
    """x [m, hidden], plus where places i32[m] is not negative the columns from `begin` on of row places[i] of `others`.

    `others` is f32[e, k]; a place beyond it is its last row.
    """

    def element(i: tirx.Var, j: tirx.Var) -> tirx.PrimExpr:
        at = tirx.max(tirx.min(places[i].astype("int64"), others.shape[0] - 1), 0)
        return tirx.if_then_else(places[i] < 0, x[i, j], x[i, j] + others[at, begin + j].astype(x.dtype))

    return te.compute(x.shape, element, name="rows_added")


def float32_rows(x: Tensor) -> Tensor:
    """x [m, hidden] -> f32[m, hidden], by a kernel of its own or the end of the one before."""

    def copied(x: te.Tensor) -> te.Tensor:
        return te.compute(x.shape, lambda i, j: x[i, j].astype("float32"), name="handed")

    return op.tensor_expr_op(copied, "handed", [x])


def scaled(x: Tensor, factor: float) -> Tensor:
    """x times a constant."""
    return x if factor == 1.0 else op.multiply(x, Tensor.from_scalar(factor, x.dtype))


def columns(x: Tensor, begin: int, count: int, dtype: str) -> Tensor:
    """x [m, k] -> dtype[m, count], the columns from `begin` on."""
    if (begin, count, dtype) == (0, int(x.shape[1]), x.dtype):
        return x
    return op.tensor_expr_op(
        lambda a: te.compute((a.shape[0], count), lambda i, j: a[i, begin + j].astype(dtype), name="columns"),
        "columns",
        [x],
    )


def write_rows(parts: Sequence[Tensor], out: Tensor) -> Tensor:
    """Write the rows [m, d] of all parts side by side to `out` f32[m, parts * d] -> `out`."""
    (m, _), d = out.shape, int(parts[0].shape[1])
    rows = [te.placeholder((m, d), part.dtype, name=f"x{index}") for index, part in enumerate(parts)]

    def element(i: tirx.Var, j: tirx.Var) -> tirx.PrimExpr:
        *others, last = enumerate(rows)
        value = last[1][i, j - last[0] * d]
        for at, row in reversed(others):
            value = tirx.if_then_else(j < (at + 1) * d, row[i, j - at * d], value)
        return value.astype("float32")

    kept = te.compute(tuple(out.shape), element, name="hidden")
    func = tag(te.create_prim_func([*rows, kept]), "keep_hidden")
    written = Tensor.placeholder(out.shape, "float32")
    return op.tensor_ir_inplace_op(func, "keep_hidden", [*parts, out], len(parts), written)
