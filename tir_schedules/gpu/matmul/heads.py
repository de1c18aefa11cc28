"""Products with the packed matrix of each head: a GEMV for each row, whose workgroups have rows of one head."""

from __future__ import annotations

import math
from dataclasses import replace

from tvm import tirx

from tir_schedules.builder import Buffer, Tensor, function, put
from tir_schedules.gpu.kernel import ceildiv, keep, launch
from tir_schedules.gpu.matmul.gemv import gemv, gemv_shape
from tir_schedules.gpu.matmul.packed import BLOCK_ROWS, Rows, packed
from tir_schedules.op import Op
from tir_schedules.rule import Declined, Knobs, NamedRule, with_output_dtype


def head_matmul(op: Op, dtype: str, knobs: Knobs) -> tirx.PrimFunc | Declined:
    """x [m, heads, columns], packed w [heads * n, k] -> y dtype[m, heads, n]."""
    weight, heads = packed(op), op.int("heads")
    if isinstance(weight, Declined):
        return weight
    n = weight.n // heads
    if n % BLOCK_ROWS:
        return Declined(f"{n} rows of a head")
    m, sizes, shape = tirx.Var("m", "int64"), weight.sizes(), gemv_shape(weight, knobs)
    shape = replace(shape, blocks=math.gcd(shape.blocks, n // BLOCK_ROWS))
    arguments = {
        "x": Tensor((m, heads, op.int("columns")), dtype),
        **weight.arguments(sizes),
        "y": Tensor((m, heads, n), dtype),
    }

    def body(x: Buffer, *rest: Buffer) -> None:
        *arrays, y = rest
        with launch(shape.threads, ceildiv(weight.blocks, shape.blocks), m) as (bx, i, tx):
            head = keep(bx * (shape.blocks * BLOCK_ROWS) // n)
            rows = Rows(weight, sizes, tuple(arrays), ())
            gemv(
                rows, shape, bx, tx, [lambda at: x[i, head, at]],
                lambda _, row, value: put(y, (i, head, row - head * n), value),
            )  # fmt: skip

    return function("head_matmul", arguments, body)


RULES = (NamedRule("gpu.head_matmul", ("head_matmul",), with_output_dtype(head_matmul)),)
