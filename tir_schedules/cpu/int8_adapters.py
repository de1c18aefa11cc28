"""y += B A x within a product of few rows with a packed weight: integer dot products, on x as that product rounds it.

t = A x is summed over pieces of K, in the tasks that quantize x; a thread adds up the pieces and rounds t to int8, 16
ranks on one scale. Each tile of y then adds B t. The numbers of a row depend on the row alone.
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


def adapters_fit(w: Packed, shape: AdapterShape) -> bool:
    """Whether products with a weight have x in the order of A: of their kernels with 4-bit codes or bit planes."""
    return shape.dtype == "uint8" and w.k % 32 == 0 and (w.blocked or w.bits == 4)


@dataclass(frozen=True)
class Shrunk:
    """t of m rows: `partial` f32[row * blocks + i, part, piece, rank] for the i-th block of a row's adapter, `sums`
    f32[row * blocks + i, part * rank], and these in int8, a panel for each row and block.

    begin, count i32[m]: each row's blocks; most i32[2]: the most that a row has, and whether all rows have the same.
    """

    partial: Buffer
    sums: Buffer
    panels: Panels
    begin: Buffer
    count: Buffer
    most: Buffer


@dataclass(frozen=True)
class Int8Adapters:
    """What a product of m rows does for their adapters; `groups` are those of x."""

    adapters: Adapters
    dot: Dot
    groups: Groups
    m: Expr
    t: Shrunk

    @property
    def shape(self) -> AdapterShape:
        return self.adapters.shape

    @property
    def blocks(self) -> Expr:
        """Blocks of the tensors: no row has more."""
        return self.adapters.A.shape[0]

    def quantize(self, X: Buffer, cover: Cover, panels: Panels) -> None:
        """Emit the panels of x, and t."""
        size = _piece_groups(self.groups)
        self._count()
        with I.parallel(-(-self.groups.count // size)) as piece:
            first, end = piece * size, I.min((piece + 1) * size, self.groups.count)
            self._ask_for_a(I.int64(0), first, end)
            with I.serial(cover.panels) as p, I.serial(cover.rows_of(p)) as r, I.serial(first, end) as g:
                quantize_group(X, cover.row(p, r), g, panels, p, r)
            with I.serial(cover.panels) as p, I.serial(cover.rows_of(p)) as r:
                row = value(cover.first_row(p) + r)
                with I.If(row < self.m), I.Then():
                    with I.If(I.And(self.t.most[1] == 0, row + 1 < self.m)), I.Then():
                        self._ask_for_a(row + 1, first, end)
                    self._shrink(panels, p, r, row, piece)
        with I.serial(self.m) as row:
            self._round(row)

    def _count(self) -> None:
        """Emit which blocks rows have."""
        t, step = self.t, self.adapters.step
        put(t.most, 0, I.int32(0))
        put(t.most, 1, I.int32(1))
        with I.serial(self.m) as row:
            put(t.begin, row, step.adapter_begin(row))
            put(t.count, row, step.adapter_end(row) - step.adapter_begin(row))
            put(t.most, 0, I.max(t.most[0], t.count[row]))
            same = I.And(t.begin[row] == t.begin[0], t.count[row] == t.count[0])
            put(t.most, 1, I.if_then_else(same, t.most[1], I.int32(0)))

    def ask(self, out: Output) -> None:
        """Ask for B of a tile."""
        t = self.t
        with I.serial(t.most[0]) as i, I.serial(I.if_then_else(t.most[1] != 0, 1, out.rows)) as r:
            row = value(I.min(out.row + r, self.m - 1))
            with I.If(i < t.count[row]), I.Then(), I.unroll(out.blocks) as b, I.unroll(RANK // 4) as word:
                prefetch(self.adapters.B, (t.begin[row] + i, out.block + b, word, 0))

    def _ask_for_a(self, row: Expr, first: Expr, end: Expr) -> None:
        """Ask for A of a row's adapter, groups of x from `first` to `end`."""
        t, words = self.t, self.groups.size // 4
        with (
            I.serial(t.begin[row], t.begin[row] + t.count[row]) as block,
            I.serial(len(self.shape.parts)) as part,
            I.serial(first * words, end * words) as word,
        ):
            prefetch(self.adapters.A, (block, part, word, 0))

    def expand(self, total: Registers, out: Output) -> None:
        """Emit total += B t in the tile of `out`; B is read once where all rows have one adapter."""
        t, lanes = self.t, total.lanes
        b = Registers(out.blocks * (LANES // lanes) * (RANK // 4), lanes, "uint32")
        parts = [value(self._part(out.block + i)) for i in range(out.blocks)]
        with I.serial(t.most[0]) as i:
            with I.If(t.most[1] != 0), I.Then():
                self._load(b, t.begin[0] + i, out)
            with I.unroll(out.rows) as r:
                row = I.min(out.row + r, self.m - 1)
                with I.If(i < t.count[row]), I.Then():
                    with I.If(t.most[1] == 0), I.Then():
                        self._load(b, t.begin[row] + i, out)
                    self._add(total, r, row * self.blocks + i, b, parts)

    def _load(self, b: Registers, block: Expr, out: Output) -> None:
        """b = the words of B for the columns of `out`, a vector of columns after the other."""
        per_block, words = LANES // b.lanes, RANK // 4
        with I.unroll(out.blocks) as i, I.unroll(per_block) as v, I.unroll(words) as word:
            columns = I.min(out.block + i, self.shape.columns // LANES - 1)
            at = (block, columns, word, v * (4 * b.lanes))
            b[(i * per_block + v) * words + word] = I.reinterpret(
                f"uint32x{b.lanes}", read(self.adapters.B, at, 4 * b.lanes)
            )

    def _add(self, total: Registers, r: Expr, at: Expr, b: Registers, parts: list[Expr]) -> None:
        """total += B t of a row, whose t is `at`."""
        t, lanes, words, vectors = self.t.panels, b.lanes, RANK // 4, LANES // b.lanes
        acc, panel = Registers(1, lanes, "int32"), value(at)
        for i, part in enumerate(parts):
            with I.unroll(vectors) as v:
                acc[0] = splat(t.corrections[panel, part, 0], lanes)
                for word in range(words):
                    codes = self.dot.codes(b[(i * vectors + v) * words + word], 8, 0, 128)
                    acc[0] = self.dot(acc[0], codes, t.words[panel, part * words + word, 0], 8)
                sums = I.cast(acc[0], f"float32x{lanes}")
                column = (r * len(parts) + i) * vectors + v
                total[column] = total[column] + sums * splat(t.scales[panel, part, 0], lanes)

    def _part(self, block: Expr) -> Expr:
        """The part that a block of 16 columns is in."""
        return self.shape.part_of(I.min(block, self.shape.columns // LANES - 1) * LANES)

    def _codes(self, buffer: Buffer, at: tuple[Expr, ...], v: Expr, lanes: int) -> Expr:
        """Bytes [4 * lanes] of the v-th vector of 16 ranks or columns."""
        words = I.reinterpret(f"uint32x{lanes}", read(buffer, (*at, v * (4 * lanes)), 4 * lanes))
        return self.dot.codes(words, 8, 0, 128)

    def _shrink(self, panels: Panels, p: Expr, r: Expr, row: Expr, piece: Expr) -> None:
        """partial[row] = A x of a piece of K, for all blocks of the row's adapter."""
        lanes, words, size = self.dot.lanes, self.groups.size // 4, _piece_groups(self.groups)
        total, acc = Registers(RANK // lanes, lanes), Registers(RANK // lanes, lanes, "int32")
        scale, zero_point = self.adapters.scale, self.dot.zero_point(8, 128)
        begin, end = value(self.t.begin[row]), value(self.t.begin[row] + self.t.count[row])
        with (
            I.serial(begin, end) as block,
            I.serial(len(self.shape.parts)) as part,
            I.If(scale[block, part, 0] != I.float32(0)),
            I.Then(),
        ):
            with I.unroll(RANK // lanes) as v:
                total[v] = splat(0.0, lanes)
            with I.serial(size) as j, I.If(piece * size + j < self.groups.count), I.Then():
                g = piece * size + j
                start = I.int32(0)
                if zero_point:  # the panels' corrections are for another zero point: whole multiples of it
                    start = I.truncdiv(panels.corrections[p, g, r] * zero_point, I.int32(self.groups.zero_point))
                with I.unroll(RANK // lanes) as v:
                    acc[v] = splat(start, lanes)
                with I.unroll(words) as word, I.unroll(RANK // lanes) as v:
                    codes = self._codes(self.adapters.A, (block, part, g * words + word), v, lanes)
                    acc[v] = self.dot(acc[v], codes, panels.words[p, g * words + word, r], 8)
                with I.unroll(RANK // lanes) as v:
                    sums = I.cast(acc[v], f"float32x{lanes}")
                    total[v] = total[v] + sums * splat(panels.scales[p, g, r], lanes)
            with I.unroll(RANK // lanes) as v:
                store(self.t.partial, (row * self.blocks + block - begin, part, piece, v * lanes), total[v], lanes)

    def _round(self, row: Expr) -> None:
        """The panels of t of a row; zeros for parts of which a block has nothing."""
        pieces, total = int(self.t.partial.shape[2]), Registers(1, RANK)
        scale = self.adapters.scale
        begin, end = value(self.t.begin[row]), value(self.t.begin[row] + self.t.count[row])
        with I.serial(begin, end) as block, I.serial(len(self.shape.parts)) as part:
            i = value(row * self.blocks + block - begin)
            total[0] = splat(0.0, RANK)
            with I.If(scale[block, part, 0] != I.float32(0)), I.Then():
                with I.serial(pieces) as piece:
                    total[0] = total[0] + read(self.t.partial, (i, part, piece, 0), RANK)
                total[0] = total[0] * read(scale, (block, part, 0), RANK)
            store(self.t.sums, (i, part * RANK), total[0], RANK)
            quantize_group(self.t.sums, i, part, self.t.panels, i, 0)


def int8_adapters(adapters: Adapters, dot: Dot, groups: Groups, m: Expr) -> Int8Adapters:
    """The adapters of a product of m rows, with memory for their t."""
    parts, count = len(adapters.shape.parts), m * adapters.A.shape[0]
    pieces = -(-groups.count // _piece_groups(groups))
    t_groups = Groups(parts * RANK, RANK, IN_ORDER, dot.zero_point(8, 128))
    partial = I.alloc_buffer((count, parts, pieces, RANK), "float32")
    sums = I.alloc_buffer((count, parts * RANK), "float32")
    begin, counts, most = (I.alloc_buffer((size,), "int32") for size in (m, m, 2))
    t = Shrunk(partial, sums, alloc_panels(t_groups, count, 1), begin, counts, most)
    return Int8Adapters(adapters, dot, groups, m, t)


def _piece_groups(groups: Groups) -> int:
    """Groups of x in a piece of K."""
    return -(-groups.count // _PIECES)
