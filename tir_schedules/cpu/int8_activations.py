"""Dynamic quantization of activations for integer dot products: int8, one scale for a group of a row's numbers.

x is about q * scale with q = round(x / scale), scale = max|x| / 127 over the group (symmetric, so that zero is exact):
an element is off by at most scale / 2. Groups whose largest magnitude is below 1e-30 become zeros; a NaN or an
infinity makes the scale of its group NaN, and so every result that reads the group.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.script import tirx as T

from tir_schedules.macro import macro

SMALLEST, LARGEST = 1e-30, 3.4e38
MAGNITUDE = 0x7FFFFFFF
# Where the numbers of 16 go, as `Int8Dot.codes` takes them from words: as they come, or even before odd of eight.
IN_ORDER = tuple(range(16))
EVEN_ODD = (0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15)
# As `int8_gemm.requantize` leaves them: the bytes of codes 0, 1, 4, 5 and of 2, 3, 6, 7.
PAIRS = (0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15)


@dataclass(frozen=True)
class Groups:
    """Rows of `k` numbers in groups of `size` (a multiple of 32), every 16 in `order`.

    `zero_point` is that of the bytes that they are multiplied with. In a panel `side` words of a row lie side by side.
    """

    k: int
    size: int
    order: tuple[int, ...]
    zero_point: int
    side: int = 1

    @property
    def count(self) -> int:
        return -(-self.k // self.size)

    @property
    def words(self) -> int:
        """int32 words of a row."""
        return self.count * self.size // 4


def _ordered(x: tirx.PrimExpr, order: tuple[int, ...]) -> tirx.PrimExpr:
    """int8[16] in that order."""
    return x if order == IN_ORDER else tirx.Shuffle([x], list(order))


@macro
def quantize_group(X, row, g, groups, Q, scales, corrections, panel, r):
    """Quantize group g of X[row] into Q[panel, words of the group, r] (int32, four numbers each), scales[panel, g, r]
    and corrections[panel, g, r] = -zero_point * sum(q). Numbers past the end of the row are zeros. With `side` words
    side by side word i is Q[panel, i // side, r * side + i % side].
    """
    size, k, side = T.meta_var((groups.size, groups.k, groups.side))
    x = T.alloc_buffer((groups.size // 16, 16), "float32")
    top = T.alloc_buffer((1, 16), "int32")
    total = T.alloc_buffer((1, 16), "int32")
    q = T.alloc_buffer((1, 16), "int32")
    word = T.alloc_buffer((4,), "int32")
    peak = T.alloc_buffer((2,), "float32")
    top[0, T.ramp(0, 1, 16)] = T.broadcast(T.int32(0), 16)
    total[0, T.ramp(0, 1, 16)] = T.broadcast(T.int32(0), 16)
    if groups.k % groups.size == 0 or g < k // size:
        for i in T.unroll(size // 16):
            x[i, T.ramp(0, 1, 16)] = X[row, T.ramp(g * size + i * 16, 1, 16)]
    else:
        for i in T.unroll(size // 16):
            x[i, T.ramp(0, 1, 16)] = T.broadcast(T.float32(0), 16)
        for i in T.serial(k % size):
            x[i // 16, i % 16] = X[row, k // size * size + i]
    # As integers magnitudes order as numbers do, and NaN is the largest.
    for i in T.unroll(size // 16):
        top[0, T.ramp(0, 1, 16)] = T.max(
            top[0, T.ramp(0, 1, 16)],
            T.bitwise_and(T.reinterpret(x[i, T.ramp(0, 1, 16)], dtype="int32x16"), T.broadcast(T.int32(MAGNITUDE), 16)),
        )
    peak[0] = T.reinterpret(
        T.call_llvm_pure_intrin(
            T.llvm_lookup_intrinsic_id("llvm.vector.reduce.smax"), top[0, T.ramp(0, 1, 16)], dtype="int32"
        ),
        dtype="float32",
    )
    peak[1] = T.Select(peak[0] > T.float32(SMALLEST), T.float32(127) / peak[0], T.float32(0))
    scales[panel, g, r] = T.Select(peak[0] < T.float32(LARGEST), peak[0] * T.float32(1 / 127), T.float32(float("nan")))
    for i in T.unroll(size // 16):
        q[0, T.ramp(0, 1, 16)] = T.cast(T.nearbyint(x[i, T.ramp(0, 1, 16)] * T.broadcast(peak[1], 16)), "int32x16")
        total[0, T.ramp(0, 1, 16)] = total[0, T.ramp(0, 1, 16)] + q[0, T.ramp(0, 1, 16)]
        word[T.ramp(0, 1, 4)] = T.reinterpret(
            _ordered(T.cast(q[0, T.ramp(0, 1, 16)], "int8x16"), groups.order), dtype="int32x4"
        )
        for j in T.unroll(4):
            Q[panel, (g * (size // 4) + i * 4 + j) // side, r * side + (g * (size // 4) + i * 4 + j) % side] = word[j]
    corrections[panel, g, r] = T.int32(-groups.zero_point) * T.call_llvm_pure_intrin(
        T.llvm_lookup_intrinsic_id("llvm.vector.reduce.add"), total[0, T.ramp(0, 1, 16)], dtype="int32"
    )


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


@macro
def quantize_panels(X, m, whole, tail, rows, tail_rows, groups, panels):
    """Quantize m rows into `whole` panels of `rows` rows, then `tail` of `tail_rows`; the last row fills the rest."""
    Q, scales, corrections = T.meta_var(panels)
    for p in T.parallel(whole + tail):
        for r in T.serial(T.if_then_else(p < whole, rows, tail_rows)):
            for g in T.serial(groups.count):
                row = T.meta_var(T.min(panel_row(p, whole, rows, tail_rows) + r, m - 1))
                quantize_group(X, row, g, groups, Q, scales, corrections, p, r)


@macro
def quantize_columns(X, m, whole, tail, rows, tail_rows, groups, panels):
    """As `quantize_panels`, in parallel over groups: few rows are less than a panel for each thread."""
    Q, scales, corrections = T.meta_var(panels)
    for g in T.parallel(groups.count):
        for p in T.serial(whole + tail):
            for r in T.serial(T.if_then_else(p < whole, rows, tail_rows)):
                row = T.meta_var(T.min(panel_row(p, whole, rows, tail_rows) + r, m - 1))
                quantize_group(X, row, g, groups, Q, scales, corrections, p, r)
