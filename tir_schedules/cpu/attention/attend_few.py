"""Attention of decode rows: every row attends to the keys of its sequence up to its own."""

from __future__ import annotations

from dataclasses import replace

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr, function
from tir_schedules.cpu.attention.flash import Tiles
from tir_schedules.cpu.attention.key_split import Queries, RowKeys, attend_in_parts
from tir_schedules.cpu.attention.pages import (
    AttentionShape,
    Pages,
    out_argument,
    pages_tensor,
    qkv_argument,
    rows_argument,
    sinks_argument,
)
from tir_schedules.step import Step, step_argument


def attend_few(shape: AttentionShape, scale: float, window: int, tiles: Tiles) -> tirx.PrimFunc:
    """qkv f32[n, row_heads, D], step i32[k], pages int8[P, page_bytes]: out f32[n, heads, v_dim].

    With `picked_rows`, `rows` i32[n] after the pages says which rows of the step these are. Heads with sinks have their
    logits in an argument before `out`, f32[heads].

    A row's result depends only on its position and its sequence's keys, not on other rows.
    """
    group, dim = shape.group, shape.head_dim
    n = tirx.Var("n", "int64")
    arguments = {
        "qkv": qkv_argument(shape, n),
        "step": step_argument(tirx.Var("k", "int64"), shape.page_group),
        "pages": pages_tensor(shape),
        **rows_argument(shape, n),
        **sinks_argument(shape),
        "out": out_argument(shape, n),
    }

    def body(qkv: Buffer, step: Step, pages: Pages, *rest: Buffer) -> None:
        *sinks, out = rest
        step = replace(step, rows=sinks.pop(0)) if shape.picked_rows else step

        def at(row: Expr, h: Expr, r: Expr) -> Expr:
            return (row * shape.row_heads + h * group + r) * dim

        queries = Queries(qkv, I.cast(n, "int32"), at, I.float32(scale))
        attend_in_parts(shape, tiles, RowKeys(pages, step), window, queries, sinks, out)

    return function("attend_few", arguments, body)
