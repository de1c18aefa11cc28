"""Group quantization: weight matrices become packed codes and scales, followed by an explicit dequantize.

Of a table whose rows hosts gather, functions take the rows of their tokens, in order.

Vectors (norms, biases) are stored in the scheme's model dtype, or the layout's, and converted where they are read.
"""

from __future__ import annotations

from tvm import relax

from mlcpipe.nn import definitions
from mlcpipe.passes.lowering import Lowering, Rebuild, is_op, rebuild
from mlcpipe.weights.table import Weight, stored


def quantize_weights(state: Lowering) -> Lowering:
    """Replace every weight with its stored arrays and the expression that restores it."""
    table = tuple(stored(w, state.scheme, state.layout) for w in state.weights)
    gathered: set[relax.Expr] = set()

    def prologue(work: Rebuild, old: list[relax.Var], new: list[relax.Var]) -> None:
        arrays = iter(new)
        for before, weight, var in zip(state.weights, table, old):
            mine = [next(arrays) for _ in weight.arrays()]
            work.values[var] = _restored(work, before, weight, mine)
            if weight.gathered:
                gathered.add(work.values[var])

    def replacement(work: Rebuild, var: relax.Var, value: relax.Expr) -> relax.Expr | None:
        return value.args[0] if is_op(value, "relax.take") and value.args[0] in gathered else None

    return rebuild(state, replacement, table, prologue)


def _restored(work: Rebuild, before: Weight, weight: Weight, arrays: list[relax.Var]) -> relax.Expr:
    """The weight as the model reads it, from its stored arrays."""
    if weight.scheme is None or weight.layout is None:
        same = weight.dtype == before.dtype
        return arrays[0] if same else work.emit(relax.op.astype(arrays[0], before.dtype))
    n, k = weight.shape[-2:]
    arrays, columns = (arrays[:-1], arrays[-1]) if weight.columns else (arrays, None)
    if weight.gathered:
        func = definitions.rows(weight.scheme, weight.layout, k, before.dtype)
        out = relax.TensorType((arrays[0].ty.shape[0], k), before.dtype)
        restored = work.emit(work.call_tir(func, "rows", arrays, out))
    else:
        func = definitions.dequantize(weight.scheme, weight.layout, n, k, before.dtype, weight.experts)
        out = relax.TensorType(weight.shape, before.dtype)
        restored = work.emit(work.call_tir(func, "dequantize", arrays, out))
    if columns is None:
        return restored
    order = work.emit(relax.op.argsort(columns))
    if weight.experts is None:
        return work.emit(relax.op.take(restored, order, axis=1, mode="clip"))
    rows = work.emit(relax.op.broadcast_to(work.emit(relax.op.expand_dims(order, 1)), weight.shape))
    return work.emit(relax.op.gather_elements(restored, rows, axis=2))
