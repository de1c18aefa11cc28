"""y += B A x within a product of decode rows with a packed weight: integer dot products, on x rounded as there.

t = A x is summed over pieces of K, in the tasks that quantize x; a thread adds up the pieces and rounds t to int8, 16
ranks on one scale, in panels as those of x. Each tile of y begins with B t. The numbers of a row depend on it alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm.script.ir_builder import tirx as I

from tir_schedules.adapter_shape import AdapterShape
from tir_schedules.builder import Buffer, Expr, put
from tir_schedules.cpu.adapters import Adapters
from tir_schedules.cpu.int8_activations import IN_ORDER, Cover, Groups, Panels, alloc_panels, quantize_group
from tir_schedules.cpu.int8_dot import Dot
from tir_schedules.cpu.packed_weight import LANES, Packed
from tir_schedules.cpu.store import Output
from tir_schedules.cpu.vectors import Registers, prefetch, read, splat, store, value
from tir_schedules.step_layout import RANK

_PIECES = 8  # of K, at most
_SUMS = 8  # vectors of A x that a thread computes at once, at most


def adapters_fit(w: Packed, shape: AdapterShape) -> bool:
    """Whether products with a weight have x in the order of A: of their kernels with 4-bit codes or bit planes.

    One scale for a row multiplies all of its sum: B t would have to come after it.
    """
    return shape.dtype == "uint8" and w.k % 32 == 0 and (w.blocked or (w.bits == 4 and w.groups > 1))


@dataclass(frozen=True)
class Int8Adapters:
    """What a product of m rows has of adapters; `groups` are those of x."""

    adapters: Adapters
    dot: Dot
    groups: Groups
    m: Expr

    def quantize(self, X: Buffer, cover: Cover, panels: Panels) -> LowRank:
        """Emit the panels of x, and t."""
        parts, blocks, rows = len(self.adapters.shape.parts), self.adapters.A.shape[0], panels.rows
        size = -(-self.groups.count // _PIECES)
        pieces = -(-self.groups.count // size)
        begin, count, most = (I.alloc_buffer((n,), "int32") for n in (self.m, self.m, 2))
        partial = I.alloc_buffer((self.m * blocks, parts, pieces, RANK), "float32")
        t_groups = Groups(parts * RANK, RANK, IN_ORDER, self.dot.zero_point(8, 128))
        t = LowRank(self, cover, begin, count, most, alloc_panels(t_groups, blocks * cover.panels, rows))
        t.count_blocks()
        with I.parallel(pieces) as piece:
            first, end = piece * size, I.min((piece + 1) * size, self.groups.count)
            t.ask_for_a(I.int64(0), first, end)
            with I.serial(cover.panels) as p, I.serial(cover.rows_of(p)) as r, I.serial(first, end) as g:
                quantize_group(X, cover.row(p, r), g, panels, p, r)
            shrink = _Shrink(t, panels, partial, piece, first, end)
            with I.serial(cover.panels) as p, I.If(t.alike):
                with I.Then():
                    shrink.rows_of_one(p)
                with I.Else(), I.serial(cover.rows_of(p)) as r:
                    shrink.row(p, r)
        sums = I.alloc_buffer((1, parts * RANK), "float32")
        with I.serial(cover.panels) as p, I.serial(cover.rows_of(p)) as r:
            row = value(cover.first_row(p) + r)
            with I.If(row < self.m), I.Then():
                t.round(p, r, row, partial, sums)
        return t


@dataclass(frozen=True)
class LowRank:
    """t of m rows: `panels` have the i-th block of the rows in panel p of x in panel i * cover.panels + p.

    begin, count i32[m]: each row's blocks; most i32[2]: the most that a row has, and whether all rows have the same.
    """

    of: Int8Adapters
    cover: Cover
    begin: Buffer
    count: Buffer
    most: Buffer
    panels: Panels

    @property
    def alike(self) -> Expr:
        """Whether all rows have the same blocks."""
        return self.most[1] != 0

    def count_blocks(self) -> None:
        """Emit which blocks rows have."""
        step, m = self.of.adapters.step, self.of.m
        put(self.most, 0, I.int32(0))
        put(self.most, 1, I.int32(1))
        with I.serial(m) as row:
            put(self.begin, row, step.adapter_begin(row))
            put(self.count, row, step.adapter_end(row) - step.adapter_begin(row))
            put(self.most, 0, I.max(self.most[0], self.count[row]))
            same = I.And(self.begin[row] == self.begin[0], self.count[row] == self.count[0])
            put(self.most, 1, I.if_then_else(same, self.most[1], I.int32(0)))

    def ask(self, out: Output, first: Expr, rows: int) -> None:
        """Ask for B of the columns after those of `out`, for some of its rows: a product would wait for all at once."""
        with I.serial(rows) as i:
            row = value(I.min(out.row + first + i, self.of.m - 1))
            with (
                I.If(I.Or(I.Not(self.alike), first + i == 0)),
                I.Then(),
                I.serial(self.begin[row], self.begin[row] + self.count[row]) as block,
                I.unroll(out.blocks) as b,
                I.unroll(RANK // 4) as word,
            ):
                prefetch(self.of.adapters.B, (block, out.at(b) + out.step, word, 0))

    def ask_for_a(self, row: Expr, first: Expr, end: Expr) -> None:
        """Ask for A of a row's adapter, groups of x from `first` to `end`."""
        words = self.of.groups.size // 4
        with (
            I.serial(self.begin[row], self.begin[row] + self.count[row]) as block,
            I.serial(len(self.of.adapters.shape.parts)) as part,
            I.serial(first * words, end * words) as word,
        ):
            prefetch(self.of.adapters.A, (block, part, word, 0))

    def expand(self, total: Registers, out: Output, panel: Expr) -> None:
        """Emit total += B t in the tile of `out`; B is read once where all rows have one adapter."""
        lanes, shape = total.lanes, self.of.adapters.shape
        b = Registers(out.blocks * (LANES // lanes) * (RANK // 4), lanes, "uint32")
        columns = [value(I.min(out.at(i), shape.columns // LANES - 1)) for i in range(out.blocks)]
        parts = [value(shape.part_of(column * LANES)) for column in columns]
        with I.serial(self.most[0]) as i:
            at = value(i * self.cover.panels + panel)
            with I.If(self.alike):
                with I.Then():
                    self._load(b, self.begin[0] + i, columns)
                    with I.unroll(out.rows) as r:
                        self._add(total, r, at, b, parts)
                with I.Else(), I.unroll(out.rows) as r:
                    row = I.min(out.row + r, self.of.m - 1)
                    with I.If(i < self.count[row]), I.Then():
                        self._load(b, self.begin[row] + i, columns)
                        self._add(total, r, at, b, parts)

    def round(self, p: Expr, r: Expr, row: Expr, partial: Buffer, sums: Buffer) -> None:
        """The panels of t of a row; zeros for parts of which a block has nothing."""
        pieces, total = int(partial.shape[2]), Registers(1, RANK)
        scale = self.of.adapters.scale
        with I.serial(self.count[row]) as i, I.serial(len(self.of.adapters.shape.parts)) as part:
            block = value(self.begin[row] + i)
            total[0] = splat(0.0, RANK)
            with I.If(scale[block, part, 0] != I.float32(0)), I.Then():
                with I.serial(pieces) as piece:
                    total[0] = total[0] + read(partial, (row * scale.shape[0] + i, part, piece, 0), RANK)
                total[0] = total[0] * read(scale, (block, part, 0), RANK)
            store(sums, (0, part * RANK), total[0], RANK)
            quantize_group(sums, 0, part, self.panels, i * self.cover.panels + p, r)

    def _load(self, b: Registers, block: Expr, columns: list[Expr]) -> None:
        """b = the words of B for blocks of columns, a vector of columns after the other."""
        per_block, words = LANES // b.lanes, RANK // 4
        for i, column in enumerate(columns):
            with I.unroll(per_block) as v, I.unroll(words) as word:
                at = (block, column, word, v * (4 * b.lanes))
                found = read(self.of.adapters.B, at, 4 * b.lanes)
                b[(i * per_block + v) * words + word] = I.reinterpret(f"uint32x{b.lanes}", found)

    def _add(self, total: Registers, r: Expr, panel: Expr, b: Registers, parts: list[Expr]) -> None:
        """total += B t of row r of a panel."""
        t, dot, lanes, words, vectors = self.panels, self.of.dot, b.lanes, RANK // 4, LANES // b.lanes
        acc = Registers(1, lanes, "int32")
        for i, part in enumerate(parts):
            with I.unroll(vectors) as v:
                acc[0] = splat(t.corrections[panel, part, r], lanes)
                for word in range(words):
                    codes = dot.codes(b[(i * vectors + v) * words + word], 8, 0, 128)
                    acc[0] = dot(acc[0], codes, t.words[panel, part * words + word, r], 8)
                sums = I.cast(acc[0], f"float32x{lanes}")
                column = (r * len(parts) + i) * vectors + v
                total[column] = total[column] + sums * splat(t.scales[panel, part, r], lanes)


@dataclass(frozen=True)
class _Shrink:
    """A x of a piece of K, groups `first` to `end`: partial f32[row * blocks + i, part, piece, rank] for the i-th block
    of a row's adapter."""

    t: LowRank
    panels: Panels
    partial: Buffer
    piece: Expr
    first: Expr
    end: Expr

    def row(self, p: Expr, r: Expr) -> None:
        """Of row r of panel p; asks for A of the next row."""
        t, row = self.t, value(self.t.cover.first_row(p) + r)
        with I.If(row < t.of.m), I.Then():
            with I.If(row + 1 < t.of.m), I.Then():
                t.ask_for_a(row + 1, self.first, self.end)
            self._blocks(p, r, 1, row)

    def rows_of_one(self, p: Expr) -> None:
        """Of all rows of panel p, which have one adapter."""
        lanes, rows = self.t.of.dot.lanes, self.panels.rows
        together = max(n for n in range(1, rows + 1) if rows % n == 0 and n * (RANK // lanes) <= _SUMS)
        with I.serial(rows // together) as i:
            self._blocks(p, i * together, together, I.int64(0))

    def _blocks(self, p: Expr, first_row: Expr, rows: int, one: Expr) -> None:
        """Of neighbouring rows with the blocks of row `one`, what there is of them."""
        t, begin = self.t, value(self.t.begin[one])
        with (
            I.serial(t.count[one]) as i,
            I.serial(len(t.of.adapters.shape.parts)) as part,
            I.If(t.of.adapters.scale[begin + i, part, 0] != I.float32(0)),
            I.Then(),
        ):
            total = self._sums(p, first_row, rows, begin + i, part)
            vectors = RANK // total.lanes
            with I.unroll(rows) as r:
                row = t.cover.first_row(p) + first_row + r
                with (
                    I.If(I.And(first_row + r < t.cover.rows_of(p), row < t.of.m)),
                    I.Then(),
                    I.unroll(vectors) as v,
                ):
                    at = (row * t.of.adapters.A.shape[0] + i, part, self.piece, v * total.lanes)
                    store(self.partial, at, total[r * vectors + v], total.lanes)

    def _sums(self, p: Expr, first_row: Expr, rows: int, block: Expr, part: Expr) -> Registers:
        """A x of rows, vectors of ranks next to each other."""
        dot, groups, panels, A = self.t.of.dot, self.t.of.groups, self.panels, self.t.of.adapters.A
        lanes, words, vectors = dot.lanes, groups.size // 4, RANK // dot.lanes
        total, acc = Registers(rows * vectors, lanes), Registers(rows * vectors, lanes, "int32")
        zero_point = dot.zero_point(8, 128)
        with I.unroll(rows * vectors) as i:
            total[i] = splat(0.0, lanes)
        with I.serial(self.first, self.end) as g:
            with I.unroll(rows) as r, I.unroll(vectors) as v:
                start = I.int32(0)
                if zero_point:  # the panels' corrections are for another zero point: whole multiples of it
                    sums = panels.corrections[p, g, first_row + r]
                    start = I.truncdiv(sums * zero_point, I.int32(groups.zero_point))
                acc[r * vectors + v] = splat(start, lanes)
            with I.unroll(words) as word, I.unroll(vectors) as v:
                at = (block, part, g * words + word, v * (4 * lanes))
                codes = value(I.reinterpret(f"uint32x{lanes}", read(A, at, 4 * lanes)))
                with I.unroll(rows) as r:
                    x = panels.words[p, g * words + word, first_row + r]
                    acc[r * vectors + v] = dot(acc[r * vectors + v], dot.codes(codes, 8, 0, 128), x, 8)
            with I.unroll(rows) as r, I.unroll(vectors) as v:
                sums = I.cast(acc[r * vectors + v], f"float32x{lanes}")
                total[r * vectors + v] = total[r * vectors + v] + sums * splat(
                    panels.scales[p, g, first_row + r], lanes
                )
        return total
