"""y[i] = x[i'] w[expert of i]^T for CPUs with integer dot products: mixture-of-experts layers over packed weights.

One token streams the weights of its experts once, all rows and columns in parallel. More tokens are sorted by expert
(a counting sort), so that the rows of an expert share its weights in panels, as in `int8_matmul.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from tvm import tirx
from tvm.script import tirx as T

from tir_schedules.cpu.int8_activations import EVEN_ODD, IN_ORDER, Groups, quantize_group
from tir_schedules.cpu.int8_dot import Dot
from tir_schedules.cpu.int8_gemm import GROUP
from tir_schedules.cpu.int8_matmul import Int8Tiles, ask_ahead, dot_of, last_of, tile_sums, tiles_of, unfit
from tir_schedules.cpu.matmul import Packed, packed_of
from tir_schedules.cpu.store import store_rows
from tir_schedules.macro import macro
from tir_schedules.op import Declined, Op


def int8_expert_matmul(op: Op, knobs: Mapping[str, int | str]) -> tirx.PrimFunc | Declined:
    """x f32[m or m * top, K], packed W [experts], ids i32[m, top] -> y f32[m * top, N]."""
    dot, w = dot_of(knobs), packed_of(op)
    if isinstance(dot, Declined):
        return dot
    reason = unfit(op, w)
    if reason:
        return Declined(reason)
    return _kernel(w, dot, tiles_of(knobs), op.int("experts"), op.int("top"), bool(op.int("shared")))


@macro
def expert_tile(panels, W, S, Y, panel, row, row_end, expert, block, rows, blocks, w, dot, groups, ask, index):
    """A register tile of an expert's rows, from its panel to the rows of Y."""
    total = T.alloc_buffer((rows * blocks * (16 // dot.lanes), dot.lanes), "float32")
    first = T.meta_var(expert * w.blocks)
    last = T.meta_var(None if last_of(w, blocks) is None else expert * w.blocks + w.blocks - 1)
    tile_sums(panels, W, S, total, panel, first + block, last, rows, blocks, w, dot, groups, ask)
    store_rows(Y, total, row, row_end, block, rows, blocks, w.n, dot.lanes, False, index)


@macro
def one_token(X, W, S, ids, Y, w, dot, groups, ahead, experts, top, x_rows):
    """The experts of one token, each a GEMV."""
    Q = T.alloc_buffer((x_rows, groups.words, 1), "int32")
    scales = T.alloc_buffer((x_rows, groups.count, 1), "float32")
    corrections = T.alloc_buffer((x_rows, groups.count, 1), "int32")
    for i in T.serial(x_rows):
        for g in T.serial(groups.count):
            quantize_group(X, i, g, groups, Q, scales, corrections, i, 0)
    for task in T.parallel(top * w.blocks):
        i: T.let[T.int32] = task // w.blocks
        expert: T.let[T.int32] = T.min(T.max(ids[0, i], 0), experts - 1)
        expert_tile(
            (Q, scales, corrections), W, S, Y, i if x_rows > 1 else 0, i, top, expert, task % w.blocks, 1, 1, w, dot,
            groups, ask_ahead(ahead), None,
        )  # fmt: skip


@macro
def sort_by_expert(ids, m, experts, top, rows, order, panel_first, panel_end, panel_expert, panel_count):
    """order = the pairs (token, choice) sorted by expert; panel p has order[panel_first[p] : panel_end[p]]."""
    fill = T.alloc_buffer((experts + 1,), "int32")
    for e in T.serial(experts + 1):
        fill[e] = 0
    for i in T.serial(m * top):
        fill[T.min(T.max(ids[i // top, i % top], 0), experts - 1) + 1] += 1
    for e in T.serial(experts):
        fill[e + 1] += fill[e]
    panel_count[0] = 0
    for e in T.serial(experts):
        for p in T.serial((fill[e + 1] - fill[e] + rows - 1) // rows):
            panel_first[panel_count[0]] = fill[e] + p * rows
            panel_end[panel_count[0]] = T.min(fill[e] + (p + 1) * rows, fill[e + 1])
            panel_expert[panel_count[0]] = e
            panel_count[0] += 1
    for i in T.serial(m * top):
        order[fill[T.min(T.max(ids[i // top, i % top], 0), experts - 1)]] = T.cast(i, "int32")
        fill[T.min(T.max(ids[i // top, i % top], 0), experts - 1)] += 1


@macro
def many_tokens(X, W, S, ids, Y, m, w, dot, tile, groups, experts, top, shared):
    """Rows in panels of one expert each; a thread takes columns, so that all share an expert's weights in time."""
    rows, blocks = T.meta_var((tile.rows, tile.blocks))
    order = T.alloc_buffer((m * top,), "int32")
    panel_first = T.alloc_buffer(((m * top + tile.rows - 1) // tile.rows + experts,), "int32")
    panel_end = T.alloc_buffer(((m * top + tile.rows - 1) // tile.rows + experts,), "int32")
    panel_expert = T.alloc_buffer(((m * top + tile.rows - 1) // tile.rows + experts,), "int32")
    panel_count = T.alloc_buffer((1,), "int32")
    sort_by_expert(ids, m, experts, top, rows, order, panel_first, panel_end, panel_expert, panel_count)
    Q = T.alloc_buffer(((m * top + tile.rows - 1) // tile.rows + experts, groups.words, tile.rows), "int32")
    scales = T.alloc_buffer(((m * top + tile.rows - 1) // tile.rows + experts, groups.count, tile.rows), "float32")
    corrections = T.alloc_buffer(((m * top + tile.rows - 1) // tile.rows + experts, groups.count, tile.rows), "int32")
    for p in T.parallel(panel_count[0]):
        for r in T.serial(rows):
            i: T.let[T.int32] = order[T.min(panel_first[p] + r, panel_end[p] - 1)]
            for g in T.serial(groups.count):
                quantize_group(X, i // top if shared else i, g, groups, Q, scales, corrections, p, r)
    for t in T.parallel(-(-w.blocks // tile.blocks)):
        for p in T.serial(panel_count[0]):
            if panel_end[p] - panel_first[p] == 1:
                expert_tile(
                    (Q, scales, corrections), W, S, Y, p, panel_first[p], panel_end[p], panel_expert[p], t * blocks,
                    1, blocks, w, dot, groups, ask_ahead(0), order,
                )  # fmt: skip
            else:
                expert_tile(
                    (Q, scales, corrections), W, S, Y, p, panel_first[p], panel_end[p], panel_expert[p], t * blocks,
                    rows, blocks, w, dot, groups, ask_ahead(0), order,
                )  # fmt: skip


@cache
def _kernel(w: Packed, dot: Dot, tiles: Int8Tiles, experts: int, top: int, shared: bool) -> tirx.PrimFunc:
    groups = Groups(w.k, GROUP, EVEN_ODD if w.bits == 4 else IN_ORDER, dot.zero_point(w.bits, w.zero_point))
    n, k_size, n_blocks, stored_groups, dtype = w.n, w.k, w.blocks, w.groups, w.dtype
    words, x_rows = w.groups * w.words_per_group, 1 if shared else top

    @T.prim_func(s_tir=True)
    def kernel(x_handle: T.handle, w_handle: T.handle, s_handle: T.handle, ids_handle: T.handle, y_handle: T.handle):
        m = T.int64()
        X = T.match_buffer(x_handle, (m * x_rows, k_size), "float32")
        W = T.match_buffer(w_handle, (experts, n_blocks, words, 16), "uint32")
        S = T.match_buffer(s_handle, (experts, n_blocks, stored_groups, 16), dtype)
        ids = T.match_buffer(ids_handle, (m, top), "int32")
        Y = T.match_buffer(y_handle, (m * top, n), "float32")
        W_blocks = T.decl_buffer((experts * n_blocks, words, 16), "uint32", data=W.data)
        S_blocks = T.decl_buffer((experts * n_blocks, stored_groups, 16), dtype, data=S.data)
        if m == T.int64(1):
            one_token(X, W_blocks, S_blocks, ids, Y, w, dot, groups, tiles.prefetch_words, experts, top, x_rows)
        else:
            many_tokens(X, W_blocks, S_blocks, ids, Y, m, w, dot, tiles.few, groups, experts, top, shared)

    return kernel
