"""Attention of prefill rows, of several sequences, over pages that the runtime owns.

Blocks of keys begin at absolute positions, and a masked key changes none of a row's sums. So a row has the same bits
in any chunk, and beside any other sequences.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Argument, Buffer, Expr, function
from tir_schedules.gpu.attention import prefill_mma
from tir_schedules.gpu.attention.pages import (
    AttentionShape,
    Pages,
    byte_pages_argument,
    heads_argument,
    qkv_argument,
    sinks_argument,
)
from tir_schedules.gpu.attention.prefill_keys import PagedKeys, attend_pages, in_products
from tir_schedules.gpu.attention.prefill_tile import PrefillTile, Tile, for_step_tile
from tir_schedules.gpu.attention.step_keys import page_table
from tir_schedules.gpu.kernel import bounded, keep
from tir_schedules.step import Step, step_argument


def attend_many(
    shape: AttentionShape,
    scale: float,
    window: int,
    size: PrefillTile = PrefillTile(),
    use_mma: bool = False,
    bidirectional: bool = False,
) -> tirx.PrimFunc:
    """qkv [n, row_heads, D], step i32[k], pages -> out [n, heads, v_dim].

    K and V of all rows are in pages already. A row sees the keys that are less than `window` positions before it (0:
    all), its own, and if `bidirectional` as many after it. Heads with sinks have their logits in an argument before
    `out`, f32[heads].
    `use_mma`: on matrix units, with `prefill_mma.TILE`, if `prefill_mma.problem` finds none.
    """
    n = tirx.Var("n", "int64")
    arguments: dict[str, Argument] = {
        "qkv": qkv_argument(shape, n),
        "step": step_argument(tirx.Var("k", "int64"), shape.page_group),
        "pages": byte_pages_argument(shape),
        **sinks_argument(shape),
        "out": heads_argument(shape, n),
    }
    block = prefill_mma.MAX_BLOCK if use_mma else size.keys

    def body(qkv: Buffer, step: Step, pages: Pages, *rest: Buffer) -> None:
        *sinks, out = rest

        def attend(tile: Tile) -> None:
            before = bounded(step.position(tile.first))
            end = bounded(before + tile.last_query + 1)
            if bidirectional:
                length = bounded(step.keys(tile.b))
                end = keep(I.min(end + (window - 1), length)) if window else length
            oldest = keep(I.max(before + tile.query(0) - (window - 1), 0)) if window else None

            def seen(query: Expr, token: Expr) -> Expr:
                at = before + query
                last = token < (I.min(at + window, end) if window else end) if bidirectional else token <= at
                return I.And(last, token > at - window) if window else last

            begin = 0 if oldest is None else keep(oldest // block * block)
            keys = PagedKeys(tile.h, pages, page_table(step, tile.b), begin, end, oldest)
            if use_mma:
                prefill_mma.attend(tile, in_products(keys, seen), qkv, out, I.float32(scale), sinks)
            else:
                attend_pages(tile, keys, seen, qkv, out, None, I.float32(scale), sinks)

        for_step_tile(shape, size, step, n, attend)

    return function("attend_many", arguments, body)
