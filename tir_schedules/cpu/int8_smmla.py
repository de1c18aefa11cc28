"""Prefill rows times a packed weight with Arm's `smmla`: two rows of x by two columns of y, 8 numbers of K each.

One instruction is twice `sdot`'s arithmetic, and its 2 x 2 sums need both factors in pairs: 8 bytes of a row of x (or
a column of y) next to 8 of the next. x is quantized into that order, and codes come to it once for all rows.

The register tile is 3 pairs of rows by 8 of columns: 24 of 32 registers are sums, and a step of 8 along K loads 11 for
24 `smmla`. Scaled float32 sums lie in memory: 32 of K are 96 `smmla` and 72 instructions that scale their sums.
"""

from __future__ import annotations

from dataclasses import replace

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr
from tir_schedules.cpu.int8_activations import Panels, quantize_rows
from tir_schedules.cpu.int8_dot import Dot, Weight
from tir_schedules.cpu.int8_unpacked import GROUP, Unpacked, alloc_unpacked, unpack, unpacked_groups
from tir_schedules.cpu.packed_weight import Packed
from tir_schedules.cpu.store import Output
from tir_schedules.cpu.vectors import Registers, read, splat

ROWS, TAIL_ROWS = 6, 4
STEP = 8  # numbers of K in an instruction
# Numbers of K between two visits of y: 16 columns are 16 KiB of bytes, which stay in L1 as 6 KiB of x pass by.
DEPTH = 1024


def smmla_fits(w: Packed, dot: Dot) -> bool:
    """True where the CPU has `smmla`, but for block formats of 8 bits."""
    return dot.kind == "neon_i8mm" and (w.bits < 8 or not w.blocked)


def _twice(pair: tirx.PrimExpr) -> tirx.PrimExpr:
    """(a, b) -> (a, a, b, b), for the sums of rows a and b with two columns."""
    return tirx.Shuffle([pair, pair], [0, 0, 1, 1])


def _alternating(pair: tirx.PrimExpr) -> tirx.PrimExpr:
    """(a, b) -> (a, b, a, b), for the sums of two rows with columns a and b."""
    return tirx.Shuffle([pair, pair], [0, 1, 0, 1])


def _row(left: tirx.PrimExpr, right: tirx.PrimExpr, which: int) -> tirx.PrimExpr:
    """The first or the second row of four columns, of their 2 x 2 sums."""
    return tirx.Shuffle([left, right], [2 * which, 2 * which + 1, 4 + 2 * which, 5 + 2 * which])


def _pairs_tile(
    panels: Panels, panel: Expr, columns: Unpacked, first: Expr, count: Expr, out: Output, weight: Weight
) -> None:
    """Emit y (+)= a panel times `count` unpacked groups, `first` and those after it."""
    pairs, steps, minima, dot = out.rows // 2, columns.size // STEP, weight.packed.minima, weight.dot
    total, acc = Registers(pairs * 8, 4), Registers(pairs * 8, 4, "int32")
    x, row_scale, by_row = Registers(pairs, 4, "int32"), Registers(pairs, 4), Registers(out.rows * 4, 4)
    with I.unroll(pairs * 8) as i:
        total[i] = splat(0.0, 4)
    with I.serial(count) as s:
        corrections = [_twice(read(panels.corrections, (panel, first + s, i * 2), 2)) for i in range(pairs)]
        for i in range(pairs):
            with I.unroll(8) as c:
                acc[i * 8 + c] = splat(I.int32(0), 4) if minima else corrections[i]
        with I.serial(steps) as k:
            with I.unroll(pairs) as i:
                x[i] = read(panels.words, (panel, (first + s) * steps + k, i * 4), 4)
            with I.unroll(8) as c, I.unroll(pairs) as i:
                w = read(columns.words, (s * steps + k, 0, c * 4), 4)
                acc[i * 8 + c] = dot.pairs(acc[i * 8 + c], x[i], w)
        for i in range(pairs):
            row_scale[i] = _twice(read(panels.scales, (panel, first + s, i * 2), 2))
            with I.unroll(8) as c:
                sums = I.cast(acc[i * 8 + c], "float32x4") * _alternating(columns.factor(s, 0, c * 2, 2))
                if minima:
                    minimum = _alternating(columns.factor(s, 0, c * 2, 2, which=1))
                    sums = sums + minimum * I.cast(corrections[i], "float32x4")
                total[i * 8 + c] = total[i * 8 + c] + sums * row_scale[i]
    with I.unroll(pairs) as i, I.unroll(4) as v:
        left, right = total[i * 8 + v * 2], total[i * 8 + v * 2 + 1]
        by_row[i * 8 + v] = _row(left, right, 0)
        by_row[i * 8 + v + 4] = _row(left, right, 1)
    out.store(by_row)


def smmla_gemm(X: Buffer, weight: Weight, Y: Buffer, m: Expr) -> None:
    """Emit y = x W^T: per 16 columns and DEPTH of K, bytes once, then all panels."""
    cover, panels = quantize_rows(X, m, replace(unpacked_groups(weight), side=2), ROWS, TAIL_ROWS)
    runs, depth = -(-weight.packed.k // GROUP), DEPTH // GROUP
    with I.parallel(weight.packed.blocks) as block:
        columns = alloc_unpacked(weight, DEPTH, 1, side=2)
        parts = GROUP // columns.size
        with I.serial(-(-runs // depth)) as d:
            first, count = d * depth, I.min(depth, runs - d * depth)
            with I.serial(count) as slot:
                unpack(weight, block, first + slot, columns, slot, 0)
            for panel, row, rows in cover.tiles():
                out = Output(Y, row, m, block, rows, 1, first > 0)
                _pairs_tile(panels, panel, columns, first * parts, count * parts, out, weight)
