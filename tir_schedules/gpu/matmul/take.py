"""Lookup of rows in a packed table: embeddings."""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Tensor, function, put
from tir_schedules.gpu.kernel import ceildiv, keep, launch
from tir_schedules.gpu.matmul.packed import BLOCK_ROWS, Rows, packed
from tir_schedules.op import Op
from tir_schedules.rule import Declined, Knobs, NamedRule, with_output_dtype


def take(op: Op, dtype: str, knobs: Knobs) -> tirx.PrimFunc | Declined:
    """Packed table [n, k], ids i32[m] -> rows dtype[m, k]; an id outside the table reads the nearest row."""
    weight = packed(op)
    if isinstance(weight, Declined):
        return weight
    m, sizes = tirx.Var("m", "int64"), weight.sizes()
    arguments = {**weight.arguments(sizes), "ids": Tensor((m,), "int32"), "y": Tensor((m, weight.k), dtype)}
    threads = int(knobs["elementwise_threads"])

    def body(*buffers: Buffer) -> None:
        rows, ids, y = Rows(weight, sizes, buffers[:-2]), buffers[-2], buffers[-1]
        with launch(threads, ceildiv(weight.words, threads), m) as (bx, i, tx):
            word = keep(bx * threads + tx)
            with I.If(word < weight.words), I.Then():
                row = keep(I.min(I.max(ids[i], 0), weight.n - 1))
                block, lane = keep(row // BLOCK_ROWS), keep(row % BLOCK_ROWS)
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


RULES = (NamedRule("gpu.take", ("take",), with_output_dtype(take)),)
