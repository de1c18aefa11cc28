"""Dynamic quantization of activations for integer dot products: int8, one scale for a group of a row's numbers.

x is about q * scale with q = round(x / scale), scale = max|x| / 127 over the group (symmetric, so that zero is exact):
an element is off by at most scale / 2. Groups whose largest magnitude is below 1e-30 become zeros; a NaN or an
infinity makes the scale of its group NaN, and so every result that reads the group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr, put
from tir_schedules.cpu.vectors import Registers, read, scratch, splat

SMALLEST, LARGEST = 1e-30, 3.4e38
MAGNITUDE = 0x7FFFFFFF
# Where the numbers of 16 go, as `Int8Dot.codes` takes them from words: as they come, or even before odd of eight.
IN_ORDER = tuple(range(16))
EVEN_ODD = (0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15)


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


@dataclass(frozen=True)
class Panels:
    """Quantized rows of x: words int32[panel, word, row], four numbers each, and scales f32[panel, group, row].

    corrections int32[panel, group, row] = -zero_point * sum(q). With `side` words next to each other word i of row r
    is words[panel, i // side, r * side + i % side].
    """

    groups: Groups
    words: Buffer
    scales: Buffer
    corrections: Buffer

    @property
    def rows(self) -> int:
        """Rows of a panel."""
        return int(self.scales.shape[2])


def alloc_panels(groups: Groups, count: Expr, rows: int) -> Panels:
    """Memory of `count` panels of `rows` rows."""
    words = I.alloc_buffer((count, groups.words // groups.side, rows * groups.side), "int32")
    scales = I.alloc_buffer((count, groups.count, rows), "float32")
    return Panels(groups, words, scales, I.alloc_buffer((count, groups.count, rows), "int32"))


def _reduce(name: str, x: Expr) -> Expr:
    """One int32 of the lanes of x."""
    return I.call_llvm_pure_intrin(I.llvm_lookup_intrinsic_id(f"llvm.vector.reduce.{name}"), x, dtype="int32")


def quantize_group(X: Buffer, row: Expr, g: Expr, panels: Panels, panel: Expr, r: Expr) -> None:
    """Row r of a panel = X[row], its group g. Numbers past the end of the row are zeros."""
    groups = panels.groups
    size, side = groups.size, groups.side
    x = Registers(size // 16, 16)
    top, total, q = (Registers(1, 16, "int32") for _ in range(3))
    word, peak = scratch(4, "int32"), scratch(2)
    # Step 1: the numbers.
    top[0] = splat(I.int32(0), 16)
    total[0] = splat(I.int32(0), 16)
    _load_group(X, row, g, groups, x)
    # Step 2: the scale. As integers magnitudes order as numbers do, and NaN is the largest.
    with I.unroll(size // 16) as i:
        magnitude = I.bitwise_and(I.reinterpret("int32x16", x[i]), splat(I.int32(MAGNITUDE), 16))
        top[0] = I.max(top[0], magnitude)
    put(peak, 0, I.reinterpret("float32", _reduce("smax", top[0])))
    put(peak, 1, I.Select(peak[0] > I.float32(SMALLEST), I.float32(127) / peak[0], I.float32(0)))
    scale = I.Select(peak[0] < I.float32(LARGEST), peak[0] * I.float32(1 / 127), I.float32(float("nan")))
    put(panels.scales, (panel, g, r), scale)
    # Step 3: the words, and the sum of their bytes.
    with I.unroll(size // 16) as i:
        q[0] = I.cast(I.nearbyint(x[i] * splat(peak[1], 16)), "int32x16")
        total[0] = total[0] + q[0]
        put(word, I.ramp(0, 1, 4), I.reinterpret("int32x4", _ordered(I.cast(q[0], "int8x16"), groups.order)))
        with I.unroll(4) as j:
            at = g * (size // 4) + i * 4 + j
            put(panels.words, (panel, at // side, r * side + at % side), word[j])
    put(panels.corrections, (panel, g, r), I.int32(-groups.zero_point) * _reduce("add", total[0]))


def _load_group(X: Buffer, row: Expr, g: Expr, groups: Groups, x: Registers) -> None:
    """x = group g of X[row]; the last one may end early."""
    size, k = groups.size, groups.k

    def whole() -> None:
        with I.unroll(size // 16) as i:
            x[i] = read(X, (row, g * size + i * 16), 16)

    if k % size == 0:
        return whole()
    with I.If(g < k // size):
        with I.Then():
            whole()
        with I.Else():
            with I.unroll(size // 16) as i:
                x[i] = splat(0.0, 16)
            with I.serial(k % size) as i:
                put(x.memory, (i // 16, i % 16), X[row, k // size * size + i])


def whole_panels(m: tirx.PrimExpr, rows: int, tail_rows: int) -> tirx.PrimExpr:
    """How many panels of `rows` rows come before those of `tail_rows` (two thirds of it, or as many).

    With 6 and 4 every m from 8 on is covered by at most one row too many.
    """
    third = rows - tail_rows
    rest = m % rows
    fewer = I.if_then_else(I.And(I.And(rest > 0, rest <= third), m > rows), I.int64(-1), I.int64(0))
    return m // rows + I.if_then_else(rest > 2 * third, I.int64(1), fewer)


def panel_row(panel: tirx.PrimExpr, whole: tirx.PrimExpr, rows: int, tail_rows: int) -> tirx.PrimExpr:
    """The first row of a panel: `whole` panels of `rows` rows come first."""
    return I.min(panel, whole) * rows + I.max(panel - whole, 0) * tail_rows


@dataclass(frozen=True)
class Cover:
    """m rows as `whole` panels of `rows` rows, then `tail` panels of `tail_rows`; the last row fills the rest."""

    m: Expr
    rows: int
    tail_rows: int
    whole: Expr
    tail: Expr

    @property
    def panels(self) -> Expr:
        """How many panels there are."""
        return self.whole + self.tail

    def first_row(self, panel: Expr) -> Expr:
        """The first row of a panel."""
        return panel_row(panel, self.whole, self.rows, self.tail_rows)

    def row(self, panel: Expr, r: Expr) -> Expr:
        """The r-th row of a panel."""
        return I.min(self.first_row(panel) + r, self.m - 1)

    def rows_of(self, panel: Expr) -> Expr:
        return I.if_then_else(panel < self.whole, self.rows, self.tail_rows)

    def tiles(self) -> Iterator[tuple[Expr, Expr, int]]:
        """Emit loops over all panels; their bodies get (panel, first row, rows)."""
        with I.serial(self.whole) as p:
            yield p, p * self.rows, self.rows
        with I.serial(self.tail) as i:
            yield self.whole + i, self.whole * self.rows + i * self.tail_rows, self.tail_rows


def one_panel(m: Expr, rows: int) -> Cover:
    """Up to `rows` rows in one panel."""
    return Cover(m, rows, rows, I.int64(1), I.int64(0))


def cover_rows(m: Expr, groups: Groups, rows: int, tail_rows: int) -> tuple[Cover, Panels]:
    """Panels that cover m rows, and their memory."""
    panels = alloc_panels(groups, (m + tail_rows - 1) // tail_rows, rows)
    whole = I.bind(whole_panels(m, rows, tail_rows))
    tail = I.bind((I.max(m - whole * rows, 0) + tail_rows - 1) // tail_rows)
    return Cover(m, rows, tail_rows, whole, tail), panels


def quantize_rows(X: Buffer, m: Expr, groups: Groups, rows: int, tail_rows: int) -> tuple[Cover, Panels]:
    """Quantize m rows, in parallel over panels."""
    cover, panels = cover_rows(m, groups, rows, tail_rows)
    with I.parallel(cover.panels) as p, I.serial(cover.rows_of(p)) as r, I.serial(groups.count) as g:
        quantize_group(X, cover.row(p, r), g, panels, p, r)
    return cover, panels
