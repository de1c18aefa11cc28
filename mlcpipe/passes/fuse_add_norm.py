"""Fuses a residual addition and the following RMS norm into one kernel; a lone norm gets its own."""

from __future__ import annotations

from tvm import relax
from tvm_ffi import structural_equal

from mlcpipe.nn import definitions
from mlcpipe.passes.lowering import Lowering, Rebuild, is_op, rebuild


def fuse_add_norm(state: Lowering) -> Lowering:
    """rms_norm(a + b, w) -> (a + b, norm) in one pass over memory."""

    def replacement(work: Rebuild, var: relax.Var, value: relax.Expr) -> relax.Expr | None:
        if not is_op(value, "relax.nn.rms_norm") or len(value.args[0].ty.shape) != 2:
            return None
        x, weight = value.args[0], value.args[1]
        stored = work.value_of(weight)
        weight = stored.args[0] if is_op(stored, "relax.astype") else weight
        size, eps, dtype = int(weight.ty.shape[0]), float(value.attrs.epsilon), str(x.ty.dtype)
        total = work.value_of(x)
        if not is_op(total, "relax.add") or not structural_equal(total.args[0].ty, total.args[1].ty):
            func = definitions.rms_norm(size, eps, dtype, str(weight.ty.dtype))
            return work.call_tir(func, "rms_norm", [x, weight], value.ty)
        func = definitions.add_rms_norm(size, eps, dtype, str(weight.ty.dtype))
        both = work.emit(work.call_tir(func, "add_rms_norm", [*total.args, weight], [x.ty, value.ty]))
        summed = work.emit(relax.TupleGetItem(both, 0))
        for old, new in list(work.values.items()):
            if new is x or (isinstance(new, relax.Var) and new.same_as(x)):
                work.values[old] = summed
        return relax.TupleGetItem(both, 1)

    return rebuild(state, replacement)
