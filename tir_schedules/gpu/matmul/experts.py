"""Matmul with the packed weights of the experts that a router chose, without subgroups: a GEMV for each expert."""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Tensor, function, put
from tir_schedules.gpu.kernel import ceildiv, keep, launch
from tir_schedules.gpu.matmul.gemv import gemv, gemv_shape
from tir_schedules.gpu.matmul.packed import Rows, packed
from tir_schedules.op import Op
from tir_schedules.rule import Declined, Knobs, NamedRule, with_output_dtype


def expert_matmul(op: Op, dtype: str, knobs: Knobs) -> tirx.PrimFunc | Declined:
    """x [m, k] (`shared`) or [m * top, k], packed w [experts, n, k], ids i32[m, top] -> y dtype[m * top, n]."""
    weight = packed(op)
    if isinstance(weight, Declined):
        return weight
    per_token, shared_x = op.int("top"), bool(op.int("shared"))
    m, sizes = tirx.Var("m", "int64"), weight.sizes()
    arguments = {
        "x": Tensor((m if shared_x else m * per_token, weight.k), dtype),
        **weight.arguments(sizes),
        "ids": Tensor((m, per_token), "int32"),
        "y": Tensor((m * per_token, weight.n), dtype),
    }
    shape = gemv_shape(weight, knobs)

    def body(x: Buffer, *rest: Buffer) -> None:
        arrays, ids, y = rest[:-2], rest[-2], rest[-1]
        with launch(shape.threads, ceildiv(weight.blocks, shape.blocks), m * per_token) as (bx, i, tx):
            expert = keep(I.min(I.max(ids[i // per_token, i % per_token], 0), weight.experts - 1))
            source = i // per_token if shared_x else i
            rows = Rows(weight, sizes, arrays, (expert,))
            gemv(rows, shape, bx, tx, [lambda at: x[source, at]], lambda _, row, value: put(y, (i, row), value))

    return function("expert_matmul", arguments, body)


RULES = (NamedRule("gpu.expert_matmul", ("expert_matmul",), with_output_dtype(expert_matmul)),)
