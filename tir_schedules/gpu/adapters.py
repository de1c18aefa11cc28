"""y += B A x on GPUs, where each row may have another adapter, or none; sums are float32, in one order for each row.

Two kernels: t = A x, a workgroup for each row, block and part, then y += B t, an invocation for each column.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.adapter_shape import AdapterShape
from tir_schedules.builder import Buffer, Expr, add, f32, function, put
from tir_schedules.gpu.kernel import barrier, bounded, ceildiv, keep, launch, local, pin, shared, workspace
from tir_schedules.op import by_hand
from tir_schedules.step import Step
from tir_schedules.step_layout import RANK

_THREADS = 64
DTYPES = ("float32", "float16")
_SLICES = _THREADS // RANK  # of K, whose sums are added in order


def add_adapters(shape: AdapterShape) -> tirx.PrimFunc:
    """(x f32[m, k], step, a, b, scale, y f32[m, N]), where y is changed in place."""
    arguments, m, blocks = shape.arguments()

    def body(X: Buffer, step: Step, A: Buffer, B: Buffer, scale: Buffer, Y: Buffer) -> None:
        t = workspace((m, blocks, len(shape.parts), RANK), "float32")
        with launch(_THREADS, m, blocks * len(shape.parts)) as (row, task, tx):
            _shrink(shape, step, X, A, scale, t, row, task, tx)
        with launch(_THREADS, ceildiv(shape.columns, _THREADS), m) as (tile, row, tx):
            column = keep(tile * _THREADS + tx)
            with I.If(column < shape.columns), I.Then():
                _expand(shape, step, B, scale, t, Y, row, column)

    return by_hand({"add_adapters": function("add_adapters", arguments, body)})["add_adapters"]


def _shrink(
    shape: AdapterShape, step: Step, X: Buffer, A: Buffer, scale: Buffer, t: Buffer, row: Expr, task: Expr, tx: Expr
) -> None:
    """t[row, index, part] = A x of the block with this index in the row's adapter, if there is one that is used."""
    parts = len(shape.parts)
    index, part, rank, first = keep(task // parts), keep(task % parts), keep(tx % RANK), keep(tx // RANK)
    begin = pin(bounded(step.adapter_begin(row)))
    inside = begin + index < bounded(step.adapter_end(row))
    block = pin(I.if_then_else(inside, begin + index, 0))
    length = pin(I.if_then_else(I.And(inside, scale[block, part, 0] != 0), shape.k // _SLICES, 0))
    total, sums = local(1), shared(_THREADS)
    put(total, 0, I.float32(0))
    with I.serial(0, length) as i:
        k = keep(i * _SLICES + first)
        add(total, 0, X[row, k] * f32(A[block, part, k, rank]))
    put(sums, tx, total[0])
    barrier()
    with I.If(I.And(first == 0, length > 0)), I.Then():
        for other in range(1, _SLICES):
            add(total, 0, sums[rank + other * RANK])
        put(t, (row, index, part, rank), total[0] * scale[block, part, rank])


def _expand(
    shape: AdapterShape, step: Step, B: Buffer, scale: Buffer, t: Buffer, Y: Buffer, row: Expr, column: Expr
) -> None:
    """y[row, column] += B t of all blocks of the row's adapter."""
    begin = pin(bounded(step.adapter_begin(row)))
    part, total = pin(I.cast(shape.part_of(column), "int32")), local(1)
    put(total, 0, Y[row, column])
    count = bounded(step.adapter_end(row)) - begin
    with I.serial(0, count) as index, I.If(scale[begin + index, part, 0] != 0), I.Then(), I.serial(0, RANK) as rank:
        product = t[row, index, part, rank] * f32(B[begin + index, column // 16, rank, column % 16])
        add(total, 0, product)
    put(Y, (row, column), total[0])
