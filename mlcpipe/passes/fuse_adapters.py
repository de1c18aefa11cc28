"""Fuses adapters into the projection's kernel, if the target has such a kernel: it then reads and rounds x once.

Rows without an adapter keep their bits: both kernels compute the projection in the same way.
"""

from __future__ import annotations

import importlib

from tvm import relax, tirx

from mlcpipe.passes.lowering import Lowering, Rebuild, rebuild, tir_op
from tir_schedules.adapter_shape import adapters_of
from tir_schedules.op import Op


def fuse_adapters(state: Lowering) -> Lowering:
    """add_adapters(x, matmul(x, packed)) -> adapted_matmul(x, packed), and a gate after it."""
    if not any(one.shape.dtype == "uint8" for one in state.adapted):
        return state
    adapted_matmul = importlib.import_module(f"tir_schedules.{state.target.kernels}.adapted_matmul").adapted_matmul

    def replacement(work: Rebuild, var: relax.Var, value: relax.Expr) -> relax.Expr | None:
        op = tir_op(work, value)
        if op is None:
            return None
        if op.kind == "gate":
            call = work.value_of(value.args[1].fields[0])
            product = tir_op(work, call)
            if product is None or product.kind != "adapted_matmul":
                return None
            return fused(work, product, product, list(call.args[1].fields), op, value)
        if op.kind != "add_adapters":
            return None
        x, *adapters, y = value.args[1].fields
        call = work.value_of(y)
        product = tir_op(work, call)
        # If the columns of the weight are sorted, the product has another x.
        if product is None or product.kind != "matmul" or not call.args[1].fields[0].same_as(x):
            return None
        return fused(work, product, op, [*call.args[1].fields, *adapters], None, value)

    def fused(
        work: Rebuild, product: Op, adapted: Op, args: list[relax.Expr], gate: Op | None, value: relax.Expr
    ) -> relax.Expr | None:
        shape = adapters_of(adapted)
        if shape is None:
            return None
        func: tirx.PrimFunc | None = adapted_matmul(product, shape, gate.str("activation") if gate is not None else "")
        return None if func is None else work.call_tir(func, "adapted_matmul", args, value.ty)

    return rebuild(state, replacement)
