"""y = x W^T for CPUs with integer dot products: W packed as `rows16`, x quantized to int8 in groups on the way.

A register tile of `rows` of x by 16 * `blocks` columns runs over all of K: per group its int32 sums, which start
at -zero_point * sum(q), are scaled into float32 sums. One row (decode) and few go from packed words to registers;
with many rows 4-bit codes are first unpacked to bytes, see `int8_gemm.py`, and CPUs that multiply matrices do, see
`int8_amx.py` and `int8_smmla.py`. x lies in panels of `rows` rows with what a tile broadcasts side by side. Layout of
W: `mlcpipe/quantization/layout.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import tirx as I

from tir_schedules.cpu.gate import Gate, apply_gate, gate_of, ungated
from tir_schedules.cpu.int8_activations import (
    EVEN_ODD,
    IN_ORDER,
    PAIRS,
    Groups,
    quantize_columns,
    quantize_group,
    whole_panels,
)
from tir_schedules.cpu.int8_amx import AMX_ROWS, amx_gemm, spans_of
from tir_schedules.cpu.int8_dot import KINDS, Dot
from tir_schedules.cpu.int8_gemm import CHUNK, DEPTH, GROUP, UNROLL, chunk_of, gemm
from tir_schedules.cpu.int8_smmla import pairs_of, smmla_gemm
from tir_schedules.cpu.matmul import Packed, packed_of
from tir_schedules.cpu.store import store_rows
from tir_schedules.cpu.vectors import Buffer, Expr, prefetch, value
from tir_schedules.macro import macro
from tir_schedules.op import Declined, Op

Ask = Callable[[Buffer, Buffer | None, Expr, Expr, int, int], None]
FEW_ROWS = 8
GEMM_ROWS = 64  # from here on unpacking codes to bytes first pays


@dataclass(frozen=True)
class Int8Tile:
    """Register tile: `rows` of x (or `tail_rows` where that wastes less) by `blocks` of 16 columns.

    `depth` of K is unpacked at a time where there are many rows, `unroll` words of it go through the loop at once.
    """

    rows: int
    tail_rows: int
    blocks: int
    depth: int = DEPTH
    unroll: int = UNROLL


@dataclass(frozen=True)
class Int8Tiles:
    """What each range of rows runs with.

    One row: `gemv_blocks` of 16 columns at once, codes asked for `prefetch_words` words of a row ahead; then `several`
    rows, `few` from FEW_ROWS on, `many` from GEMM_ROWS on.
    """

    prefetch_words: int
    gemv_blocks: int
    several: Int8Tile
    few: Int8Tile
    many: Int8Tile


def dot_of(knobs: Mapping[str, int | str]) -> Dot | Declined:
    """The integer dot product that the schedule's facts name."""
    kind = str(knobs.get("int8_dot", "none"))
    if kind not in KINDS:
        return Declined("no integer dot product")
    if not knobs.get("int8_activations", 1):
        return Declined("activations stay float32")
    return Dot(kind, int(knobs["lanes"]))


def int8_matmul(op: Op, knobs: Mapping[str, int | str]) -> tirx.PrimFunc | Declined:
    """The kernel for a tagged `matmul` or `gated_matmul`: x f32[m, K], packed W, y f32[m, N] or [m, N / 2], m >= 1."""
    dot, w = dot_of(knobs), packed_of(op)
    if isinstance(dot, Declined):
        return dot
    reason = unfit(op, w)
    if reason:
        return Declined(reason)
    return _kernel(w, dot, tiles_of(knobs), gate_of(op))


def tiles_of(knobs: Mapping[str, int | str]) -> Int8Tiles:
    """The register tiles that the schedule's facts state: `int8_rows` for all, `int8_rows.few` for few rows alone.

    So a tile for 16 rows may be one that would waste most of itself on 2.
    """

    def tile(bucket: str) -> Int8Tile:
        sizes = (knobs.get(f"int8_{name}.{bucket}", knobs[f"int8_{name}"]) for name in ("rows", "tail_rows", "blocks"))
        depth, unroll = knobs.get("int8_depth", DEPTH), knobs.get("int8_unroll", UNROLL)
        rows, tail_rows, blocks = map(int, sizes)
        return Int8Tile(rows, tail_rows, blocks, int(depth), int(unroll))

    blocks = int(knobs.get("int8_gemv_blocks", 1))
    return Int8Tiles(int(knobs["int8_prefetch_words"]), blocks, tile("several"), tile("few"), tile("gemm"))


def unfit(op: Op, w: Packed) -> str:
    """Why the integer kernels do not take a weight, or nothing."""
    if op.str("layout") != "rows16":
        return f"weight layout {op.str('layout')} has no CPU kernel"
    if w.bits not in (4, 8) or w.codes_per_word * w.bits != 32:
        return f"{w.bits}-bit codes, {w.codes_per_word} a word"
    if w.group_size != GROUP and w.groups > 1:
        return f"groups of {w.group_size}"
    return ""


def last_of(w: Packed, blocks: int) -> int | None:
    """The last block of a weight that is read `blocks` at a time; None where they end together."""
    return w.blocks - 1 if w.blocks % blocks else None


def stored(block: Expr, last: Expr | None) -> Expr:
    """The block, or the last one instead of any after it."""
    return block if last is None else T.min(block, last)


def ask_ahead(words: int) -> Ask:
    """Asks for the codes that many words of a row further, and for their scales; 0: for none."""

    def ask(W: Buffer, S: Buffer | None, block: Expr, g: Expr, count: int, blocks: int) -> None:
        for b in range(blocks if words else 0):
            for word in range(count):
                prefetch(W, (block + b, g * count + word + words, 0))
            if S is not None:
                prefetch(S, (block + b, g + words // count, 0))

    return ask


def ask_for_next(panel: Expr, panels: Expr) -> Ask:
    """Asks for the next columns: each of the panels that these columns serve asks for its share of the codes.

    If the first asked for all of them, the memory would have nothing to do during the others. Scales are asked for
    too: the hardware follows them only to the end of a page, and waiting there took a quarter of the time with 6 rows.
    """

    def ask(W: Buffer, S: Buffer | None, block: Expr, g: Expr, count: int, blocks: int) -> None:
        share = value((count * blocks + panels - 1) // panels)
        at = value(g * (count * blocks) + panel * share)
        with I.serial(0, share) as i:
            prefetch(W, (block + blocks, at + i, 0))
        if S is not None:
            prefetch(S, (block + blocks, g * blocks, 0))

    return ask


@macro
def tile_sums(panels, W, S, total, panel, block, last_block, rows, blocks, w, dot, groups, ask):
    """total[r * vectors + v] = the sums of row r of a panel and of the v-th vector of the columns from `block` on.

    Blocks past `last_block` repeat it; None: there are none. W uint32[blocks, words, 16] and S [blocks, groups, 16] as
    `rows16` has them. ask(W, S, block, group, words, blocks) asks for what comes later, group by group.
    """
    Q, scales, corrections = T.meta_var(panels)
    lanes, per_block, vectors = T.meta_var((dot.lanes, 16 // dot.lanes, blocks * (16 // dot.lanes)))
    parts, words = T.meta_var((8 // w.bits, groups.size * w.bits // 32))
    acc = T.alloc_buffer((rows * blocks * (16 // dot.lanes), dot.lanes), "int32")
    word = T.alloc_buffer((blocks * (16 // dot.lanes), dot.lanes), "uint32")
    scale = T.alloc_buffer((blocks * (16 // dot.lanes), dot.lanes), "float32")
    for i in T.unroll(rows * vectors):
        total[i, T.ramp(0, 1, lanes)] = T.broadcast(T.float32(0), lanes)
    for g in T.serial(groups.count):
        ask(W, S if w.groups > 1 else None, block, g, words, blocks)
        for r in T.unroll(rows):
            for v in T.unroll(vectors):
                acc[r * vectors + v, T.ramp(0, 1, lanes)] = T.broadcast(corrections[panel, g, r], lanes)
        for part_of_group in T.serial(words // w.bits):
            for i in T.unroll(w.bits):
                j = T.meta_var(g * words + part_of_group * w.bits + i)
                for v in T.unroll(vectors):
                    word[v, T.ramp(0, 1, lanes)] = W[
                        stored(block + v // per_block, last_block), j, T.ramp(v % per_block * lanes, 1, lanes)
                    ]
                for part in T.unroll(parts):
                    for r in T.unroll(rows):
                        for v in T.unroll(vectors):
                            acc[r * vectors + v, T.ramp(0, 1, lanes)] = dot(
                                acc[r * vectors + v, T.ramp(0, 1, lanes)],
                                dot.codes(word[v, T.ramp(0, 1, lanes)], w.bits, part, w.zero_point),
                                Q[panel, j * parts + part, r],
                                w.bits,
                            )
        if w.groups > 1:
            for v in T.unroll(vectors):
                scale[v, T.ramp(0, 1, lanes)] = T.cast(
                    S[stored(block + v // per_block, last_block), g, T.ramp(v % per_block * lanes, 1, lanes)],
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
                S[stored(block + v // per_block, last_block), 0, T.ramp(v % per_block * lanes, 1, lanes)],
                f"float32x{dot.lanes}",
            )
            for r in T.unroll(rows):
                total[r * vectors + v, T.ramp(0, 1, lanes)] = (
                    total[r * vectors + v, T.ramp(0, 1, lanes)] * scale[v, T.ramp(0, 1, lanes)]
                )


@macro
def direct_tile(panels, W, S, Y, panel, row, row_end, block, last_block, rows, blocks, w, dot, groups, ask):
    """A register tile from its panel to Y, codes unpacked on the way."""
    total = T.alloc_buffer((rows * blocks * (16 // dot.lanes), dot.lanes), "float32")
    tile_sums(panels, W, S, total, panel, block, last_block, rows, blocks, w, dot, groups, ask)
    store_rows(Y, total, row, row_end, block, rows, blocks, w.n, dot.lanes)


@macro
def direct(X, W, S, Y, m, w, dot, tile, groups):
    """Few rows: every panel unpacks the codes for itself, and asks for its share of those of the next columns."""
    rows, tail_rows, blocks, last = T.meta_var((tile.rows, tile.tail_rows, tile.blocks, last_of(w, tile.blocks)))
    Q = T.alloc_buffer(((m + tile.tail_rows - 1) // tile.tail_rows, groups.words, tile.rows), "int32")
    scales = T.alloc_buffer(((m + tile.tail_rows - 1) // tile.tail_rows, groups.count, tile.rows), "float32")
    corrections = T.alloc_buffer(((m + tile.tail_rows - 1) // tile.tail_rows, groups.count, tile.rows), "int32")
    whole: T.let[T.int64] = whole_panels(m, rows, tail_rows)
    tail: T.let[T.int64] = (T.max(m - whole * rows, 0) + tail_rows - 1) // tail_rows
    quantize_columns(X, m, whole, tail, rows, tail_rows, groups, (Q, scales, corrections))
    for t in T.parallel(-(-w.blocks // tile.blocks)):
        for p in T.serial(whole):
            direct_tile(
                (Q, scales, corrections), W, S, Y, p, p * rows, m, t * blocks, last, rows, blocks, w, dot, groups,
                ask_for_next(p, whole + tail),
            )  # fmt: skip
        for i in T.serial(tail):
            row = T.meta_var(whole * rows + i * tail_rows)
            direct_tile(
                (Q, scales, corrections), W, S, Y, whole + i, row, m, t * blocks, last, tail_rows, blocks, w, dot,
                groups, ask_for_next(whole + i, whole + tail),
            )  # fmt: skip


@macro
def few_rows(X, W, S, Y, m, w, dot, tiles, groups):
    """From two rows on, with the tile of several or of few rows."""
    if tiles.several == tiles.few:
        direct(X, W, S, Y, m, w, dot, tiles.few, groups)
    else:
        if m < T.int64(FEW_ROWS):
            direct(X, W, S, Y, m, w, dot, tiles.several, groups)
        else:
            direct(X, W, S, Y, m, w, dot, tiles.few, groups)


@macro
def one_row(X, W, S, Y, w, dot, groups, ahead, blocks):
    """A GEMV: the packed weight streams by once, `blocks` of it at a time, codes `ahead` words further asked for."""
    Q = T.alloc_buffer((1, groups.words, 1), "int32")
    scales = T.alloc_buffer((1, groups.count, 1), "float32")
    corrections = T.alloc_buffer((1, groups.count, 1), "int32")
    for g in T.serial(groups.count):
        quantize_group(X, 0, g, groups, Q, scales, corrections, 0, 0)
    for t in T.parallel(-(-w.blocks // blocks)):
        direct_tile(
            (Q, scales, corrections), W, S, Y, 0, 0, 1, t * blocks, last_of(w, blocks), 1, blocks, w, dot, groups,
            ask_ahead(ahead),
        )  # fmt: skip


@cache
def _kernel(w: Packed, dot: Dot, tiles: Int8Tiles, gate: Gate | None) -> tirx.PrimFunc:
    offset, order = dot.zero_point(w.bits, w.zero_point), EVEN_ODD if w.bits == 4 else IN_ORDER
    fine = Groups(w.k, GROUP, order, offset)
    chunk = chunk_of(w, dot)
    coarse = Groups(w.k, chunk, PAIRS, dot.byte_offset) if chunk else None
    # With one scale a row nothing but x bounds the length of an integer sum.
    many = Groups(w.k, CHUNK, order, offset) if w.groups == 1 and w.k % CHUNK == 0 else fine
    spans, pairs = spans_of(w, dot), pairs_of(w, dot)
    k_size, n_blocks, groups, dtype = w.k, w.blocks, w.groups, w.dtype
    words, columns = w.groups * w.words_per_group, w.n if gate is None else gate.width
    fused = gate if chunk and spans is None and pairs is None and columns % 16 == 0 else None

    @T.prim_func(s_tir=True)
    def kernel(x_handle: T.handle, w_handle: T.handle, s_handle: T.handle, y_handle: T.handle):
        m = T.int64()
        X = T.match_buffer(x_handle, (m, k_size), "float32")
        W = T.match_buffer(w_handle, (n_blocks, words, 16), "uint32")
        S = T.match_buffer(s_handle, (n_blocks, groups, 16), dtype)
        Y = T.match_buffer(y_handle, (m, columns), "float32")
        if m == T.int64(1):
            row = T.meta_var(ungated(gate, Y, 1))
            one_row(X, W, S, row, w, dot, fine, tiles.prefetch_words, tiles.gemv_blocks)
            apply_gate(gate, row, Y, 1)
        else:
            if spans is not None:
                if m < T.int64(AMX_ROWS):
                    few = T.meta_var(ungated(gate, Y, m))
                    few_rows(X, W, S, few, m, w, dot, tiles, many)
                    apply_gate(gate, few, Y, m)
                else:
                    rows = T.meta_var(ungated(gate, Y, m))
                    amx_gemm(X, W, S, rows, m, w, dot, spans)
                    apply_gate(gate, rows, Y, m)
            elif pairs is not None:
                if m < T.int64(pairs.least_rows):
                    few = T.meta_var(ungated(gate, Y, m))
                    few_rows(X, W, S, few, m, w, dot, tiles, many)
                    apply_gate(gate, few, Y, m)
                else:
                    rows = T.meta_var(ungated(gate, Y, m))
                    smmla_gemm(X, W, S, rows, m, w, dot, pairs)
                    apply_gate(gate, rows, Y, m)
            elif coarse is None:
                rows = T.meta_var(ungated(gate, Y, m))
                few_rows(X, W, S, rows, m, w, dot, tiles, many)
                apply_gate(gate, rows, Y, m)
            else:
                if m < T.int64(GEMM_ROWS):
                    few = T.meta_var(ungated(gate, Y, m))
                    few_rows(X, W, S, few, m, w, dot, tiles, fine)
                    apply_gate(gate, few, Y, m)
                elif fused is not None:
                    gemm(X, W, S, Y, m, w, dot, tiles.many, coarse, fused)
                else:
                    rows = T.meta_var(ungated(gate, Y, m))
                    gemm(X, W, S, rows, m, w, dot, tiles.many, coarse, None)
                    apply_gate(gate, rows, Y, m)

    return kernel
