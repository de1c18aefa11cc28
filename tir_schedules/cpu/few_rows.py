"""Decode rows times a packed weight in float32, with the sums of a GEMV: as many parts, added in the same order.

So a row of decode has the same numbers whichever rows are beside it. The parts of a register tile would need eight (or
four) times its registers: one part after the other runs over a piece of K that stays in L1.
"""

from __future__ import annotations

from collections.abc import Iterator

from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr, put
from tir_schedules.cpu.packed_weight import LANES, Plain, Quantized, codes, sum_of
from tir_schedules.cpu.store import Output
from tir_schedules.cpu.vectors import Registers, load, read, splat, store

PARTS = 8  # of a sum over plain weights, by k modulo 8
GROUP_PARTS = 4  # of a group's sum, by the code's place in its word modulo 4
DEPTH = 256  # of K in a piece
TAIL_ROWS = 4  # of the tiles after the whole panels


def few_rows(X: Buffer, weight: Plain | Quantized, Y: Buffer, m: Expr, rows: int, blocks: int) -> None:
    """Emit Y = X W^T in parallel over tiles of `blocks` blocks; `rows` of x (a multiple of 4) are a panel."""
    if isinstance(weight, Plain):
        panels = _plain_panels(X, weight, m, rows)
        with I.parallel(-(-weight.w.blocks // blocks)) as t:
            for panel, first, count in _tiles(m, rows):
                out = Output(Y, panel * rows + first, m, t * blocks, count, blocks)
                _plain_tile(weight, panels, panel, first, out)
        return
    panels, biases = _quantized_panels(X, weight, m, rows)
    depth = weight.depth(DEPTH)
    with I.parallel(-(-weight.w.blocks // blocks)) as t:
        columns = I.alloc_buffer((depth, blocks * LANES), "float32")
        with I.serial(-(-weight.groups * weight.group // depth)) as chunk:
            _unpack(weight, columns, t * blocks, chunk, depth)
            for panel, first, count in _tiles(m, rows):
                out = Output(Y, panel * rows + first, m, t * blocks, count, blocks)
                group = chunk * (depth // weight.group)
                _quantized_tile(weight, (panels, biases), panel, first, columns, group, out)


def _tiles(m: Expr, rows: int) -> Iterator[tuple[Expr, Expr, int]]:
    """Emit loops over whole panels, and over tiles of TAIL_ROWS after them; bodies get (panel, its row, rows)."""
    with I.serial(m // rows) as i:
        yield i, 0, rows
    with I.serial((m % rows + TAIL_ROWS - 1) // TAIL_ROWS) as i:
        yield m // rows, i * TAIL_ROWS, TAIL_ROWS


def _plain_panels(X: Buffer, weight: Plain, m: Expr, rows: int) -> Buffer:
    """f32[panel, k, row] of X; rows past the end are zeros."""
    panels = I.alloc_buffer(((m + rows - 1) // rows, weight.w.k, rows), "float32")
    with I.parallel((m + rows - 1) // rows) as panel, I.serial(rows) as r, I.serial(weight.w.k) as k:
        put(panels, (panel, k, r), I.if_then_else(panel * rows + r < m, X[panel * rows + r, k], I.float32(0)))
    return panels


def _plain_tile(weight: Plain, panels: Buffer, panel: Expr, first: Expr, out: Output) -> None:
    """Emit a tile of y: PARTS sums of each element, then their sum in pairs."""
    rows, blocks, k_size = out.rows, out.blocks, weight.w.k
    sums = I.alloc_buffer((PARTS, rows * blocks, LANES), "float32")
    part, total = Registers(rows * blocks, LANES), Registers(rows * blocks, LANES)
    eights, piece = k_size // PARTS, DEPTH // PARTS

    def add(k: Expr) -> None:
        with I.unroll(blocks) as b, I.unroll(rows) as r:
            block = I.min(out.block + b, weight.w.blocks - 1)
            x = splat(panels[panel, k, first + r], LANES)
            part[r * blocks + b] = part[r * blocks + b] + load(weight.W, (block, k, 0), LANES) * x

    with I.serial(PARTS) as p, I.unroll(rows * blocks) as i:
        store(sums, (p, i, 0), splat(0.0, LANES), LANES)
    with I.serial(-(-eights // piece)) as chunk, I.serial(PARTS) as p:
        with I.unroll(rows * blocks) as i:
            part[i] = read(sums, (p, i, 0), LANES)
        with I.serial(I.min(piece, eights - chunk * piece)) as k:
            add((chunk * piece + k) * PARTS + p)
        with I.unroll(rows * blocks) as i:
            store(sums, (p, i, 0), part[i], LANES)
    with I.unroll(rows * blocks) as i:
        part[i] = read(sums, (0, i, 0), LANES)
    with I.serial(k_size % PARTS) as k:
        add(eights * PARTS + k)
    with I.unroll(rows * blocks) as i:
        store(sums, (0, i, 0), part[i], LANES)
    each = Registers(PARTS, LANES)
    with I.unroll(rows * blocks) as i:
        with I.unroll(PARTS) as p:
            each[p] = read(sums, (p, i, 0), LANES)
        total[i] = sum_of(each, 0, PARTS)
    out.store(total)


def _quantized_panels(X: Buffer, weight: Quantized, m: Expr, rows: int) -> tuple[Buffer, Buffer]:
    """f32[panel, k, row] of X with zeros past its ends; f32[panel, group, row]: where the sums of a group begin."""
    count, padded = (m + rows - 1) // rows, weight.groups * weight.group
    panels = I.alloc_buffer((count, padded, rows), "float32")
    biases = I.alloc_buffer((count, weight.groups, rows), "float32")
    with I.parallel(count) as panel, I.serial(rows) as r:
        x, bias = weight.padded_row(X, I.min(panel * rows + r, m - 1))
        with I.serial(padded) as k:
            put(panels, (panel, k, r), x[k])
        with I.serial(weight.groups) as g:
            put(biases, (panel, g, r), bias[g])
    return panels, biases


def _unpack(weight: Quantized, columns: Buffer, block: Expr, chunk: Expr, depth: int) -> None:
    """columns[k, 16 * b :] = the codes of blocks from `block` on, `depth` of K from `depth` * chunk on."""
    w, groups, per_word = weight.w, depth // weight.group, weight.w.codes_per_word
    word = Registers(1, LANES, "uint32")
    first = chunk * groups
    blocks, here = int(columns.shape[1]) // LANES, I.min(groups, weight.groups - first)
    with I.serial(blocks) as b, I.serial(here) as g, I.unroll(weight.words) as j:
        stored = I.min(block + b, w.blocks - 1)
        word[0] = read(weight.W, (stored, (first + g) * weight.words + j, 0), LANES)
        with I.unroll(per_word) as i:
            store(columns, (g * weight.group + j * per_word + i, b * LANES), codes(word[0], i, w.bits), LANES)


def _quantized_tile(
    weight: Quantized,
    x: tuple[Buffer, Buffer],
    panel: Expr,
    first_row: Expr,
    columns: Buffer,
    first: Expr,
    out: Output,
) -> None:
    """Emit y (+)= the products with the codes in `columns`, groups from `first` on; `x`: panels and biases."""
    panels, biases = x
    rows, blocks, per_word = out.rows, out.blocks, weight.w.codes_per_word
    total, part, *kept = (Registers(rows * blocks, LANES) for _ in range(4))
    out.restore(total, first > 0)

    def sum_part(p: int, g: Expr) -> None:
        with I.unroll(rows) as r, I.unroll(blocks) as b:
            start = biases[panel, first + g, first_row + r] if p == 0 else I.float32(0)
            part[r * blocks + b] = splat(start, LANES)
        with I.serial(weight.words) as j:
            for i in range(p, per_word, GROUP_PARTS):
                k = g * weight.group + j * per_word + i
                with I.unroll(rows) as r, I.unroll(blocks) as b:
                    value = splat(panels[panel, first * weight.group + k, first_row + r], LANES)
                    code = read(columns, (k, b * LANES), LANES)
                    part[r * blocks + b] = part[r * blocks + b] + code * value

    with I.serial(I.min(depth_groups(columns, weight), weight.groups - first)) as g:
        for p in range(GROUP_PARTS):  # (0 + 1) + (2 + 3), as `sum_of` adds them
            sum_part(p, g)
            with I.unroll(rows * blocks) as i:
                if p == 3:
                    pairs = kept[0][i] + (kept[1][i] + part[i])
                    scale = weight.scale(I.min(out.block + i % blocks, weight.w.blocks - 1), first + g)
                    total[i] = total[i] + pairs * scale
                else:
                    kept[p // 2][i] = kept[0][i] + part[i] if p == 1 else part[i]
    out.store(total)


def depth_groups(columns: Buffer, weight: Quantized) -> int:
    """How many groups `columns` has."""
    return int(columns.shape[0]) // weight.group
