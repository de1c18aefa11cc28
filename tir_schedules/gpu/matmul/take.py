"""Lookup of rows in a packed table: embeddings; rows that the host has looked up."""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr, Tensor, function, put
from tir_schedules.gpu.kernel import ceildiv, keep, launch
from tir_schedules.gpu.matmul.packed import BLOCK_ROWS, Rows, packed
from tir_schedules.op import Op
from tir_schedules.rule import Declined, Knobs, NamedRule, with_output_dtype


def take(op: Op, dtype: str, knobs: Knobs) -> tirx.PrimFunc | Declined:
    """Packed table [n, k], ids i32[m] -> rows dtype[m, k]; an id outside the table reads the nearest row.

    Of "rows" the packed arrays are those of the m rows, without ids.
    """
    weight = packed(op)
    if isinstance(weight, Declined):
        return weight
    m = tirx.Var("m", "int64")
    sizes = weight.of_rows(m) if weight.by_row else weight.sizes()
    ids_argument = {} if weight.by_row else {"ids": Tensor((m,), "int32")}
    arguments = {**weight.arguments(sizes), **ids_argument, "y": Tensor((m, weight.k), dtype)}
    threads = int(knobs["elementwise_threads"])

    def body(*buffers: Buffer) -> None:
        rows, y = Rows(weight, sizes, buffers[: -1 - len(ids_argument)]), buffers[-1]
        with launch(threads, ceildiv(weight.words, threads), m) as (bx, i, tx):
            word = keep(bx * threads + tx)
            with I.If(word < weight.words), I.Then():
                block, lane = (i, 0) if weight.by_row else _place(buffers[-2][i], weight.n)
                scale = rows.scale(block, lane, word).pinned() if weight.bits else None
                for j, element in enumerate(rows.elements(block, lane, word)):
                    value = element if scale is None else scale.value(element, weight.zero_point)
                    column = word * weight.run + j
                    inside = rows.inside(column)
                    if inside is None:
                        put(y, (i, column), value)
                        continue
                    with I.If(inside), I.Then():
                        put(y, (i, column), value)

    return function("take", arguments, body)


def _place(row: Expr, n: int) -> tuple[Expr, Expr]:
    """The block and lane of a row, of the nearest one if there is none such."""
    row = keep(I.min(I.max(row, 0), n - 1))
    return keep(row // BLOCK_ROWS), keep(row % BLOCK_ROWS)


RULES = (NamedRule("gpu.take", ("take", "rows"), with_output_dtype(take)),)
