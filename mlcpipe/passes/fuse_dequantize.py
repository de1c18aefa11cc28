"""Fuses dequantize into its consumers: matmul, embedding lookup, expert matmul read packed weights."""

from __future__ import annotations

from tvm import relax

from mlcpipe.nn import definitions
from mlcpipe.passes.lowering import Lowering, Rebuild, is_op, rebuild, scheme_of, tir_op
from mlcpipe.quantization.layout import load_layout
from tir_schedules.op import Op


def fuse_dequantize(state: Lowering) -> Lowering:
    """Replace op(x, dequantize(packed)) with one tagged PrimFunc over the packed arrays."""

    def replacement(work: Rebuild, var: relax.Var, value: relax.Expr) -> relax.Expr | None:
        if is_op(value, "relax.matmul"):
            transposed = work.value_of(value.args[1])
            if is_op(transposed, "relax.permute_dims"):
                return _matmul(work, state, value, transposed.args[0])
        if is_op(value, "relax.take") and not _takes_columns(value):
            return _take(work, state, value)
        if is_op(value, "relax.call_tir"):
            outer = tir_op(work, value)
            if outer is not None and outer.kind in _OF_MATRICES:
                return _OF_MATRICES[outer.kind](work, state, value, outer)
        return None

    return rebuild(state, replacement)


def _dequantized(work: Rebuild, expr: relax.Expr) -> tuple[Op, list[relax.Expr]] | None:
    """The operation and packed arrays of a `dequantize` call; None for other expressions."""
    call = work.value_of(expr)
    op = tir_op(work, call)
    return None if op is None or op.kind != "dequantize" else (op, list(call.args[1].fields))


def _matmul(work: Rebuild, state: Lowering, value: relax.Call, weight: relax.Expr) -> relax.Expr | None:
    """If the columns of the weight are sorted, take those of x in the same order."""
    x, restored = value.args[0], work.value_of(weight)
    if _takes_columns(restored):
        weight = restored.args[0]
        x = work.emit(relax.op.take(x, _order(work, restored.args[1]), axis=1, mode="clip"))
    source = _dequantized(work, weight)
    if source is None:
        return None
    op, packed = source
    func = definitions.matmul(
        scheme_of(state, op), load_layout(op.str("layout")), op.int("n"), op.int("k"), str(value.ty.dtype)
    )
    return work.call_tir(func, "matmul", [x, *packed], value.ty)


def _order(work: Rebuild, indices: relax.Expr) -> relax.Expr:
    """The stored order of columns, whose inverse the indices are."""
    inverse = work.value_of(indices)
    while not is_op(inverse, "relax.argsort"):
        inverse = work.value_of(inverse.args[0])
    return inverse.args[0]


def _takes_columns(expr: relax.Expr) -> bool:
    return is_op(expr, "relax.take") and expr.attrs.axis is not None and int(expr.attrs.axis) == 1


def _take(work: Rebuild, state: Lowering, value: relax.Call) -> relax.Expr | None:
    source = _dequantized(work, value.args[0])
    if source is None:
        return None
    op, packed = source
    func = definitions.take(
        scheme_of(state, op), load_layout(op.str("layout")), op.int("n"), op.int("k"), str(value.ty.dtype)
    )
    return work.call_tir(func, "take", [*packed, value.args[1]], value.ty)


def _expert_matmul(work: Rebuild, state: Lowering, value: relax.Call, outer: Op) -> relax.Expr | None:
    x, weight, ids = value.args[1].fields
    shared, restored = bool(outer.int("shared")), work.value_of(weight)
    is_sorted = is_op(restored, "relax.gather_elements")
    source = _dequantized(work, restored.args[0] if is_sorted else weight)
    if source is None:
        return None
    op, packed = source
    dtype, top = str(value.ty.dtype), outer.int("top")
    if is_sorted:
        func = definitions.expert_columns(outer.int("experts"), op.int("k"), top, shared, dtype)
        out = relax.TensorType((value.ty.shape[0], op.int("k")), dtype)
        x = work.emit(work.call_tir(func, "expert_columns", [x, _order(work, restored.args[1]), ids], out))
        shared = False
    func = definitions.expert_matmul(
        scheme_of(state, op),
        load_layout(op.str("layout")),
        outer.int("experts"),
        op.int("n"),
        op.int("k"),
        top,
        shared,
        dtype,
    )
    return work.call_tir(func, "expert_matmul", [x, *packed, ids], value.ty)


def _head_matmul(work: Rebuild, state: Lowering, value: relax.Call, outer: Op) -> relax.Expr | None:
    x, weight = value.args[1].fields
    source = _dequantized(work, weight)
    if source is None:
        return None
    op, packed = source
    heads = outer.int("heads")
    sizes = (heads, op.int("n") // heads, op.int("k"), outer.int("columns"))
    func = definitions.head_matmul(scheme_of(state, op), load_layout(op.str("layout")), *sizes, str(value.ty.dtype))
    return work.call_tir(func, "head_matmul", [x, *packed], value.ty)


_OF_MATRICES = {"expert_matmul": _expert_matmul, "head_matmul": _head_matmul}
