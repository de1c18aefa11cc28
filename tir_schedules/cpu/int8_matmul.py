"""y = x W^T for CPUs with integer dot products: W packed as `rows16`, x quantized to int8 in groups of 32 on the way.

A register tile of `rows` of x by 16 * `blocks` columns runs over all of K: per group of 32 its int32 sums, which start
at -zero_point * sum(q), are scaled into float32 sums. Codes go from the packed words to registers, so that decode
(one row) and prefill (many) read the same bytes, and nothing but x is rewritten. x lies in panels of `rows` rows with
what a tile broadcasts side by side. Layout of W: `mlcpipe/quantization/layout.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from tvm import tirx
from tvm.script import tirx as T

from tir_schedules.cpu.int8_activations import GROUP, quantize_group
from tir_schedules.cpu.int8_dot import KINDS, Dot
from tir_schedules.cpu.matmul import Packed, packed_of
from tir_schedules.op import Declined, Op


@dataclass(frozen=True)
class Int8Tile:
    """Register tile: `rows` of x (or `tail_rows` where that wastes less) by `blocks` of 16 columns.

    `prefetch_groups`: a GEMV asks for the codes this many groups ahead.
    """

    rows: int
    tail_rows: int
    blocks: int
    prefetch_groups: int


def dot_of(knobs: Mapping[str, int | str]) -> Dot | Declined:
    """The integer dot product that the schedule's facts name."""
    kind = str(knobs.get("int8_dot", "none"))
    if kind not in KINDS:
        return Declined("no integer dot product")
    if not knobs.get("int8_activations", 1):
        return Declined("activations stay float32")
    return Dot(kind, int(knobs["lanes"]))


def int8_matmul(op: Op, knobs: Mapping[str, int | str]) -> tirx.PrimFunc | Declined:
    """The kernel for a tagged `matmul`: x f32[m, K], packed W, y f32[m, N], any m >= 1."""
    dot, w = dot_of(knobs), packed_of(op)
    if isinstance(dot, Declined):
        return dot
    reason = unfit(op, w)
    if reason:
        return Declined(reason)
    tile = Int8Tile(*(int(knobs[f"int8_{name}"]) for name in ("rows", "tail_rows", "blocks", "prefetch_groups")))
    return _kernel(w, dot, tile)


def unfit(op: Op, w: Packed) -> str:
    """Why the integer kernels do not take a weight, or nothing."""
    if op.str("layout") != "rows16":
        return f"weight layout {op.str('layout')} has no CPU kernel"
    if w.bits not in (4, 8) or w.codes_per_word * w.bits != 32:
        return f"{w.bits}-bit codes, {w.codes_per_word} a word"
    if w.group_size != GROUP and w.groups > 1:
        return f"groups of {w.group_size}"
    return ""


def prefetch(address: tirx.PrimExpr) -> tirx.PrimExpr:
    """Ask for a cache line that will be read; an address past the end does no harm."""
    read, all_levels, data = T.int32(0), T.int32(3), T.int32(1)
    return T.call_llvm_intrin(
        T.llvm_lookup_intrinsic_id("llvm.prefetch"), address, read, all_levels, data, dtype="void"
    )


@T.macro
def tile_sums(Q, scales, corrections, W, S, total, panel, block, last_block, rows, blocks, w, dot, prefetch_groups):
    """total[r * vectors + v] = the sums of row r of a panel and of the v-th vector of the columns from `block` on.

    Blocks past `last_block` repeat it. W uint32[blocks, words, 16] and S [blocks, groups, 16] as `rows16` has them.
    """
    per_block = T.meta_var(16 // dot.lanes)
    vectors = T.meta_var(blocks * (16 // dot.lanes))
    parts = T.meta_var(8 // w.bits)
    lanes = T.meta_var(dot.lanes)
    acc = T.alloc_buffer((rows * blocks * (16 // dot.lanes), dot.lanes), "int32")
    word = T.alloc_buffer((blocks * (16 // dot.lanes), dot.lanes), "uint32")
    scale = T.alloc_buffer((blocks * (16 // dot.lanes), dot.lanes), "float32")
    for i in T.unroll(rows * vectors):
        total[i, T.ramp(0, 1, lanes)] = T.broadcast(T.float32(0), lanes)
    for g in T.serial(-(-w.k // 32)):
        for r in T.unroll(rows):
            for v in T.unroll(vectors):
                acc[r * vectors + v, T.ramp(0, 1, lanes)] = T.broadcast(corrections[panel, g, r], lanes)
        for j in T.unroll(w.bits):
            for v in T.unroll(vectors):
                word[v, T.ramp(0, 1, lanes)] = W[
                    T.min(block + v // per_block, last_block),
                    g * w.bits + j,
                    T.ramp(v % per_block * lanes, 1, lanes),
                ]
            if prefetch_groups > 0:
                T.evaluate(prefetch(T.address_of(W[block, (g + prefetch_groups) * w.bits + j, 0])))
            for part in T.unroll(parts):
                for r in T.unroll(rows):
                    for v in T.unroll(vectors):
                        acc[r * vectors + v, T.ramp(0, 1, lanes)] = dot(
                            acc[r * vectors + v, T.ramp(0, 1, lanes)],
                            dot.codes(word[v, T.ramp(0, 1, lanes)], w.bits, part, w.zero_point),
                            Q[panel, (g * w.bits + j) * parts + part, r],
                            w.bits,
                        )
        if w.groups > 1:
            for v in T.unroll(vectors):
                scale[v, T.ramp(0, 1, lanes)] = T.cast(
                    S[T.min(block + v // per_block, last_block), g, T.ramp(v % per_block * lanes, 1, lanes)],
                    f"float32x{dot.lanes}",
                )
        for r in T.unroll(rows):
            for v in T.unroll(vectors):
                factor = T.meta_var(T.broadcast(scales[panel, g, r], lanes))
                total[r * vectors + v, T.ramp(0, 1, lanes)] = total[r * vectors + v, T.ramp(0, 1, lanes)] + T.cast(
                    acc[r * vectors + v, T.ramp(0, 1, lanes)], f"float32x{dot.lanes}"
                ) * (factor * scale[v, T.ramp(0, 1, lanes)] if w.groups > 1 else factor)
    if w.groups == 1:
        for v in T.unroll(vectors):
            scale[v, T.ramp(0, 1, lanes)] = T.cast(
                S[T.min(block + v // per_block, last_block), 0, T.ramp(v % per_block * lanes, 1, lanes)],
                f"float32x{dot.lanes}",
            )
            for r in T.unroll(rows):
                total[r * vectors + v, T.ramp(0, 1, lanes)] = (
                    total[r * vectors + v, T.ramp(0, 1, lanes)] * scale[v, T.ramp(0, 1, lanes)]
                )


@T.macro
def store_rows(Y, total, row, row_end, block, rows, blocks, w, dot):
    """Y[row : row + rows, 16 * block :] = total, as far as rows lie before `row_end` and columns exist."""
    per_block = T.meta_var(16 // dot.lanes)
    vectors = T.meta_var(blocks * (16 // dot.lanes))
    lanes = T.meta_var(dot.lanes)
    for r in T.unroll(rows):
        if row + r < row_end:
            for v in T.unroll(vectors):
                if block + v // per_block < w.n // 16:
                    Y[row + r, T.ramp((block + v // per_block) * 16 + v % per_block * lanes, 1, lanes)] = total[
                        r * vectors + v, T.ramp(0, 1, lanes)
                    ]
                else:
                    for lane in T.serial(lanes):
                        if (block + v // per_block) * 16 + v % per_block * lanes + lane < w.n:
                            Y[row + r, (block + v // per_block) * 16 + v % per_block * lanes + lane] = total[
                                r * vectors + v, lane
                            ]


@T.macro
def one_tile(Q, scales, corrections, W, S, Y, panel, row, row_end, block, last_block, rows, blocks, w, dot, ahead):
    """A register tile from its panel to Y."""
    total = T.alloc_buffer((rows * blocks * (16 // dot.lanes), dot.lanes), "float32")
    tile_sums(Q, scales, corrections, W, S, total, panel, block, last_block, rows, blocks, w, dot, ahead)
    store_rows(Y, total, row, row_end, block, rows, blocks, w, dot)


@cache
def _kernel(w: Packed, dot: Dot, tile: Int8Tile) -> tirx.PrimFunc:
    n, k_size, n_blocks, stored_groups, bits, dtype = w.n, w.k, w.blocks, w.groups, w.bits, w.dtype
    words = w.groups * w.words_per_group
    groups = -(-k_size // GROUP)
    offset = dot.zero_point(bits, w.zero_point)
    rows, tail_rows, blocks, ahead = tile.rows, tile.tail_rows, tile.blocks, tile.prefetch_groups
    n_tiles = -(-n_blocks // blocks)

    @T.prim_func(s_tir=True)
    def kernel(x_handle: T.handle, w_handle: T.handle, s_handle: T.handle, y_handle: T.handle):
        m = T.int64()
        X = T.match_buffer(x_handle, (m, k_size), "float32")
        W = T.match_buffer(w_handle, (n_blocks, words, 16), "uint32")
        S = T.match_buffer(s_handle, (n_blocks, stored_groups, 16), dtype)
        Y = T.match_buffer(y_handle, (m, n), "float32")
        if m == T.int64(1):
            q = T.alloc_buffer((1, groups * 8, 1), "int32")
            scales = T.alloc_buffer((1, groups, 1), "float32")
            corrections = T.alloc_buffer((1, groups, 1), "int32")
            for g in T.serial(groups):
                quantize_group(X, 0, g, k_size, bits, offset, q, scales, corrections, 0, 0)
            for block in T.parallel(n_blocks):
                one_tile(q, scales, corrections, W, S, Y, 0, 0, 1, block, n_blocks - 1, 1, 1, w, dot, ahead)
        else:
            Q = T.alloc_buffer(((m + tail_rows - 1) // tail_rows, groups * 8, rows), "int32")
            all_scales = T.alloc_buffer(((m + tail_rows - 1) // tail_rows, groups, rows), "float32")
            all_corrections = T.alloc_buffer(((m + tail_rows - 1) // tail_rows, groups, rows), "int32")
            whole: T.let[T.int64] = whole_panels(m, rows, tail_rows)
            tail: T.let[T.int64] = (T.max(m - whole * rows, 0) + tail_rows - 1) // tail_rows
            for p in T.parallel(whole + tail):
                for r in T.serial(T.if_then_else(p < whole, rows, tail_rows)):
                    for g in T.serial(groups):
                        row = T.meta_var(T.min(panel_row(p, whole, rows, tail_rows) + r, m - 1))
                        quantize_group(X, row, g, k_size, bits, offset, Q, all_scales, all_corrections, p, r)
            for t in T.parallel(n_tiles):
                for p in T.serial(whole):
                    one_tile(
                        Q,
                        all_scales,
                        all_corrections,
                        W,
                        S,
                        Y,
                        p,
                        p * rows,
                        m,
                        t * blocks,
                        n_blocks - 1,
                        rows,
                        blocks,
                        w,
                        dot,
                        0,
                    )
                for i in T.serial(tail):
                    one_tile(
                        Q,
                        all_scales,
                        all_corrections,
                        W,
                        S,
                        Y,
                        whole + i,
                        whole * rows + i * tail_rows,
                        m,
                        t * blocks,
                        n_blocks - 1,
                        tail_rows,
                        blocks,
                        w,
                        dot,
                        0,
                    )

    return kernel


def whole_panels(m: tirx.PrimExpr, rows: int, tail_rows: int) -> tirx.PrimExpr:
    """How many panels of `rows` rows come before those of `tail_rows` (two thirds of it, or as many).

    With 6 and 4 every m from 8 on is covered by at most one row too many.
    """
    third = rows - tail_rows
    rest = m % rows
    fewer = T.if_then_else(T.And(T.And(rest > 0, rest <= third), m > rows), T.int64(-1), T.int64(0))
    return m // rows + T.if_then_else(rest > 2 * third, T.int64(1), fewer)


def panel_row(panel: tirx.PrimExpr, whole: tirx.PrimExpr, rows: int, tail_rows: int) -> tirx.PrimExpr:
    """The first row of a panel: `whole` panels of `rows` rows come first."""
    return T.min(panel, whole) * rows + T.max(panel - whole, 0) * tail_rows
