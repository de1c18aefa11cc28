"""Prefill rows times a packed weight with Arm's `smmla`: two rows of x by two columns of y, 8 numbers of K each.

One instruction is twice `sdot`'s arithmetic, and its 2 x 2 sums need both factors in pairs: 8 bytes of a row of x (or
a column of y) next to 8 of the next. x is quantized into that order. Weights come to it once for all rows, in scratch,
as signed bytes: 4-bit codes on one scale for 128 as in `int8_gemm.py` where K has whole chunks, else the codes
themselves on the scale of their group.

The register tile is 3 pairs of rows by 8 of columns: 24 of 32 registers are sums, and a step of 8 along K loads 11 for
24 `smmla`. Scaled float32 sums lie in memory between spans of one scale.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr
from tir_schedules.cpu.int8_activations import EVEN_ODD, IN_ORDER, PAIRS, Groups, Panels, quantize_rows
from tir_schedules.cpu.int8_dot import Dot, Weight
from tir_schedules.cpu.int8_gemm import CHUNK, gemm_fits, requantize
from tir_schedules.cpu.int8_unpacked import Unpacked
from tir_schedules.cpu.packed_weight import Packed
from tir_schedules.cpu.store import Output
from tir_schedules.cpu.vectors import Registers, load, read, splat, store

ROWS, TAIL_ROWS = 6, 4
STEP = 8  # numbers of K in an instruction
# Numbers of K between two visits of y: 16 columns are 16 KiB of bytes, which stay in L1 as 6 KiB of x pass by.
DEPTH = 1024


@dataclass(frozen=True)
class Spans:
    """How x and a weight are multiplied: `groups` of x share one scale, and their products one integer sum."""

    groups: Groups
    requantized: bool  # 4-bit codes on one scale for 128; else codes as they are

    @property
    def steps(self) -> int:
        """Instructions along K in a span."""
        return self.groups.size // STEP

    @property
    def depth(self) -> int:
        """Spans between two visits of y."""
        return DEPTH // self.groups.size


def pairs_of(w: Packed, dot: Dot) -> Spans | None:
    """The spans of a weight, where the CPU has `smmla`; None: it has not."""
    if dot.kind != "neon_i8mm":
        return None
    if gemm_fits(w, dot):
        return Spans(Groups(w.k, CHUNK, PAIRS, dot.byte_offset, side=2), requantized=True)
    if w.blocked:
        return None
    # With one scale a row nothing but x bounds the length of an integer sum.
    size = CHUNK if w.groups == 1 and w.k % CHUNK == 0 else 32
    order, zero_point = EVEN_ODD if w.bits == 4 else IN_ORDER, dot.zero_point(w.bits, w.zero_point)
    return Spans(Groups(w.k, size, order, zero_point, side=2), requantized=False)


def _twice(pair: tirx.PrimExpr) -> tirx.PrimExpr:
    """(a, b) -> (a, a, b, b), for the sums of rows a and b with two columns."""
    return tirx.Shuffle([pair, pair], [0, 0, 1, 1])


def _alternating(pair: tirx.PrimExpr) -> tirx.PrimExpr:
    """(a, b) -> (a, b, a, b), for the sums of two rows with columns a and b."""
    return tirx.Shuffle([pair, pair], [0, 1, 0, 1])


def _row(left: tirx.PrimExpr, right: tirx.PrimExpr, which: int) -> tirx.PrimExpr:
    """The first or the second row of four columns, of their 2 x 2 sums."""
    return tirx.Shuffle([left, right], [2 * which, 2 * which + 1, 4 + 2 * which, 5 + 2 * which])


def unpack(weight: Weight, block: Expr, span: Expr, out: Unpacked, slot: Expr, steps: int) -> None:
    """Emit a span of a block of 16 rows -> a slot of `out`: the codes' bytes, and their scales as they are."""
    w = weight.packed
    parts, words = 8 // w.bits, STEP * w.bits // 32
    half = Registers(2, 4, "uint32")
    with I.unroll(steps) as i, I.unroll(4) as v:
        with I.unroll(2) as h:
            word = read(weight.words, (block, (span * steps + i) * words + h // parts, v * 4), 4)
            half[h] = I.reinterpret("uint32x4", weight.dot.codes(word, w.bits, h % parts, w.zero_point))
        out.put_eight(slot * steps + i, 0, v, half)
    store(out.scales, (slot, 0, 0), load(weight.scales, (block, span if w.groups > 1 else 0, 0), 16), 16)


def _pairs_tile(
    panels: Panels, panel: Expr, columns: Unpacked, first: Expr, count: Expr, out: Output, dot: Dot
) -> None:
    """Emit y (+)= a panel times `count` unpacked spans, `first` and those after it."""
    pairs, steps = out.rows // 2, columns.size // STEP
    total, acc = Registers(pairs * 8, 4), Registers(pairs * 8, 4, "int32")
    x, row_scale, by_row = Registers(pairs, 4, "int32"), Registers(pairs, 4), Registers(out.rows * 4, 4)
    with I.unroll(pairs * 8) as i:
        total[i] = splat(0.0, 4)
    with I.serial(count) as s:
        with I.unroll(pairs) as i, I.unroll(8) as c:
            acc[i * 8 + c] = _twice(read(panels.corrections, (panel, first + s, i * 2), 2))
        with I.serial(steps) as k:
            with I.unroll(pairs) as i:
                x[i] = read(panels.words, (panel, (first + s) * steps + k, i * 4), 4)
            with I.unroll(8) as c, I.unroll(pairs) as i:
                w = read(columns.words, (s * steps + k, 0, c * 4), 4)
                acc[i * 8 + c] = dot.pairs(acc[i * 8 + c], x[i], w)
        with I.unroll(pairs) as i:
            row_scale[i] = _twice(read(panels.scales, (panel, first + s, i * 2), 2))
            with I.unroll(8) as c:
                scale = _alternating(read(columns.scales, (s, 0, c * 2), 2)) * row_scale[i]
                total[i * 8 + c] = total[i * 8 + c] + I.cast(acc[i * 8 + c], "float32x4") * scale
    with I.unroll(pairs) as i, I.unroll(4) as v:
        left, right = total[i * 8 + v * 2], total[i * 8 + v * 2 + 1]
        by_row[i * 8 + v] = _row(left, right, 0)
        by_row[i * 8 + v + 4] = _row(left, right, 1)
    out.store(by_row)


def smmla_gemm(X: Buffer, weight: Weight, Y: Buffer, m: Expr, spans: Spans) -> None:
    """Emit y = x W^T: per 16 columns and DEPTH of K, bytes once, then all panels."""
    cover, panels = quantize_rows(X, m, spans.groups, ROWS, TAIL_ROWS)
    with I.parallel(weight.packed.blocks) as block:
        words = I.alloc_buffer((DEPTH // STEP, 1, 32), "uint32")
        scales = I.alloc_buffer((spans.depth, 1, 16), "float32")
        columns = Unpacked(words, scales, spans.groups.size, side=2)
        with I.serial(-(-spans.groups.count // spans.depth)) as d:
            first = d * spans.depth
            count = I.min(spans.depth, spans.groups.count - first)
            with I.serial(count) as slot:
                if spans.requantized:
                    requantize(weight, block, first + slot, columns, slot, 0)
                else:
                    unpack(weight, block, first + slot, columns, slot, spans.steps)
            for panel, row, rows in cover.tiles():
                out = Output(Y, row, m, block, rows, 1, first > 0)
                _pairs_tile(panels, panel, columns, first, count, out, weight.dot)
