"""Many rows times a packed weight with Arm's `smmla`: two rows of x by two columns of y, 8 numbers of K each.

One instruction is twice `sdot`'s arithmetic, and its 2 x 2 sums need both factors in pairs: 8 bytes of a row of x (or
a column of y) beside 8 of the next. x is quantized into that order. Weights come to it once for all rows, in scratch,
as signed bytes: 4-bit codes on one scale for 128 as in `int8_gemm.py` where K has whole chunks, else the codes
themselves on the scale of their group.

The register tile is 3 pairs of rows by 8 of columns: 24 of 32 registers are sums, and a step of 8 along K loads 11 for
24 `smmla`. Scaled float32 sums lie in memory between spans of one scale.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.script import tirx as T

from tir_schedules.cpu.int8_activations import EVEN_ODD, IN_ORDER, PAIRS, Groups, quantize_panels, whole_panels
from tir_schedules.cpu.int8_dot import Dot
from tir_schedules.cpu.int8_gemm import CHUNK, gemm_fits, put_halves, requantize
from tir_schedules.cpu.matmul import Packed
from tir_schedules.cpu.store import store_rows
from tir_schedules.macro import macro

ROWS, TAIL_ROWS = 6, 4
STEP = 8  # numbers of K in an instruction
# Numbers of K between two visits of y: 16 columns are 16 KiB of bytes, which stay in L1 as 6 KiB of x pass by.
DEPTH = 1024


@dataclass(frozen=True)
class Spans:
    """How x and a weight are multiplied: `groups` of x have one scale, and products of them one integer sum."""

    groups: Groups
    requantized: bool  # 4-bit codes on one scale for 128; else codes as they are

    @property
    def steps(self) -> int:
        """Instructions along K in a span."""
        return self.groups.size // STEP

    @property
    def least_rows(self) -> int:
        """Rows of x from which on unpacking pays: fewer instructions are executed than with `sdot` from packed words
        (counted under qemu for N = 256, K = 1024 on 2026-11-21).
        """
        return 7 if self.requantized else 4

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
    # With one scale a row nothing but x bounds the length of an integer sum.
    size = CHUNK if w.groups == 1 and w.k % CHUNK == 0 else 32
    order, zero_point = EVEN_ODD if w.bits == 4 else IN_ORDER, dot.zero_point(w.bits, w.zero_point)
    return Spans(Groups(w.k, size, order, zero_point, side=2), requantized=False)


def _twice(pair: tirx.PrimExpr) -> tirx.PrimExpr:
    """(a, b) -> (a, a, b, b), for the sums of rows a and b with two columns."""
    return tirx.Shuffle([pair, pair], [0, 0, 1, 1])


def _by_turns(pair: tirx.PrimExpr) -> tirx.PrimExpr:
    """(a, b) -> (a, b, a, b), for the sums of two rows with columns a and b."""
    return tirx.Shuffle([pair, pair], [0, 1, 0, 1])


def _row(left: tirx.PrimExpr, right: tirx.PrimExpr, which: int) -> tirx.PrimExpr:
    """The first or the second row of four columns, of their 2 x 2 sums."""
    return tirx.Shuffle([left, right], [2 * which, 2 * which + 1, 4 + 2 * which, 5 + 2 * which])


@macro
def unpack(W, S, bytes_, scales, block, span, slot, w, dot, spans):
    """A span of a block of 16 rows -> bytes_[spans.steps * slot :, 0], 8 bytes of each row, and scales[slot, 0]."""
    parts, words = T.meta_var((8 // w.bits, STEP * w.bits // 32))
    half = T.alloc_buffer((2, 4), "uint32")
    for i in T.unroll(spans.steps):
        for v in T.unroll(4):
            for h in T.unroll(2):
                word = T.meta_var(W[block, (span * spans.steps + i) * words + h // parts, T.ramp(v * 4, 1, 4)])
                half[h, T.ramp(0, 1, 4)] = T.reinterpret(
                    dot.codes(word, w.bits, h % parts, w.zero_point), dtype="uint32x4"
                )
            put_halves(bytes_, half, slot * spans.steps + i, 0, v, 4, 2)
    scales[slot, 0, T.ramp(0, 1, 16)] = T.cast(S[block, span if w.groups > 1 else 0, T.ramp(0, 1, 16)], "float32x16")


@macro
def pairs_tile(panels, bytes_, steps, Y, panel, row, m, block, first, count, rows, n, dot, spans):
    """Y[row : row + rows, 16 * block :] (+)= the products of `count` unpacked spans from span `first` on."""
    Q, scales, corrections = T.meta_var(panels)
    total = T.alloc_buffer((rows // 2 * 8, 4), "float32")
    acc = T.alloc_buffer((rows // 2 * 8, 4), "int32")
    x = T.alloc_buffer((rows // 2, 4), "int32")
    row_scale = T.alloc_buffer((rows // 2, 4), "float32")
    by_row = T.alloc_buffer((rows * 4, 4), "float32")
    for i in T.unroll(rows // 2 * 8):
        total[i, T.ramp(0, 1, 4)] = T.broadcast(T.float32(0), 4)
    for s in T.serial(count):
        for i in T.unroll(rows // 2):
            for c in T.unroll(8):
                acc[i * 8 + c, T.ramp(0, 1, 4)] = _twice(corrections[panel, first + s, T.ramp(i * 2, 1, 2)])
        for k in T.serial(spans.steps):
            for i in T.unroll(rows // 2):
                x[i, T.ramp(0, 1, 4)] = Q[panel, (first + s) * spans.steps + k, T.ramp(i * 4, 1, 4)]
            for c in T.unroll(8):
                for i in T.unroll(rows // 2):
                    acc[i * 8 + c, T.ramp(0, 1, 4)] = dot.pairs(
                        acc[i * 8 + c, T.ramp(0, 1, 4)],
                        x[i, T.ramp(0, 1, 4)],
                        bytes_[s * spans.steps + k, 0, T.ramp(c * 4, 1, 4)],
                    )
        for i in T.unroll(rows // 2):
            row_scale[i, T.ramp(0, 1, 4)] = _twice(scales[panel, first + s, T.ramp(i * 2, 1, 2)])
            for c in T.unroll(8):
                total[i * 8 + c, T.ramp(0, 1, 4)] = total[i * 8 + c, T.ramp(0, 1, 4)] + T.cast(
                    acc[i * 8 + c, T.ramp(0, 1, 4)], "float32x4"
                ) * (_by_turns(steps[s, 0, T.ramp(c * 2, 1, 2)]) * row_scale[i, T.ramp(0, 1, 4)])
    for i in T.unroll(rows // 2):
        for v in T.unroll(4):
            left = T.meta_var(total[i * 8 + v * 2, T.ramp(0, 1, 4)])
            right = T.meta_var(total[i * 8 + v * 2 + 1, T.ramp(0, 1, 4)])
            by_row[i * 8 + v, T.ramp(0, 1, 4)] = _row(left, right, 0)
            by_row[i * 8 + v + 4, T.ramp(0, 1, 4)] = _row(left, right, 1)
    store_rows(Y, by_row, row, m, block, rows, 1, n, 4, first > 0)


@macro
def smmla_gemm(X, W, S, Y, m, w, dot, spans):
    """y = x W^T: per 16 columns and DEPTH of K, bytes once, then all panels."""
    groups, count = T.meta_var((spans.groups, spans.groups.count))
    Q = T.alloc_buffer(((m + TAIL_ROWS - 1) // TAIL_ROWS, groups.words // 2, ROWS * 2), "int32")
    scales = T.alloc_buffer(((m + TAIL_ROWS - 1) // TAIL_ROWS, groups.count, ROWS), "float32")
    corrections = T.alloc_buffer(((m + TAIL_ROWS - 1) // TAIL_ROWS, groups.count, ROWS), "int32")
    whole: T.let[T.int64] = whole_panels(m, ROWS, TAIL_ROWS)
    tail: T.let[T.int64] = (T.max(m - whole * ROWS, 0) + TAIL_ROWS - 1) // TAIL_ROWS
    quantize_panels(X, m, whole, tail, ROWS, TAIL_ROWS, groups, (Q, scales, corrections))
    for block in T.parallel(w.blocks):
        bytes_ = T.alloc_buffer((DEPTH // STEP, 1, 32), "uint32")
        steps = T.alloc_buffer((spans.depth, 1, 16), "float32")
        for d in T.serial(-(-count // spans.depth)):
            first = T.meta_var(d * spans.depth)
            here = T.meta_var(T.min(spans.depth, count - first))
            for slot in T.serial(here):
                if spans.requantized:
                    requantize(W, S, bytes_, steps, block, 0, first + slot, slot, w, dot, 2)
                else:
                    unpack(W, S, bytes_, steps, block, first + slot, slot, w, dot, spans)
            for p in T.serial(whole):
                pairs_tile(
                    (Q, scales, corrections), bytes_, steps, Y, p, p * ROWS, m, block, first, here, ROWS, w.n, dot,
                    spans,
                )  # fmt: skip
            for i in T.serial(tail):
                row = T.meta_var(whole * ROWS + i * TAIL_ROWS)
                pairs_tile(
                    (Q, scales, corrections), bytes_, steps, Y, whole + i, row, m, block, first, here, TAIL_ROWS, w.n,
                    dot, spans,
                )  # fmt: skip
