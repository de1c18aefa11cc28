"""Decode rows times a packed weight: groups of 32 on their own scales, codes from packed words to registers.

Decode has one row for each sequence: its sums are the same numbers whichever rows are beside it. Each takes the
groups in their order, in tiles of any size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import gcd

from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr
from tir_schedules.cpu.adapters import Adapters
from tir_schedules.cpu.int8_activations import Groups, Panels, alloc_panels, cover_rows, one_panel, quantize_group
from tir_schedules.cpu.int8_adapters import Int8Adapters, LowRank
from tir_schedules.cpu.int8_blocks import byte_shift, codes_of
from tir_schedules.cpu.int8_dot import Sums, Weight
from tir_schedules.cpu.int8_gemm import Int8Tile
from tir_schedules.cpu.packed_weight import LANES
from tir_schedules.cpu.planes import scale_of, zero_of
from tir_schedules.cpu.store import Output
from tir_schedules.cpu.vectors import Registers, load, prefetch, read, splat, value

# ask(blocks, group, words of a group) emits prefetches of what comes after a group.
Ask = Callable[[Sequence[Expr], Expr, int], None]
FEW_ROWS, FEW_OF_MANY = 8, 2
# Rows of one panel where vectors have 16 lanes: one block of columns is 12 sums and as many of a group, in registers.
# Two panels of 4 rows took 1.17 of the time of one of 8 with 4-bit codes, 1.37 with 8-bit codes (Zen 5, 2026-11-22).
# With panels of 2 and 3 rows two answers of Qwen2 0.5B came 1.06 times as fast, three 1.03 (Zen 4, 2026-11-26).
ONE_PANEL = (2, 3, 4, 6, 8, 12)
# How many words one or two panels ask ahead. A whole block, which may be all of the first cache, took 1.1 to 1.3 of the
# time with 4 rows of 4 bits in one panel, 1.2 with 8 rows of 8 bits; with AVX2 1.1 with one panel of 2 rows, 1.06 with
# two, 0.98 with four. 32 to 96 words were alike (Zen 4, 2026-11-25).
_PREFETCH_WORDS, _ASK_SOON = 48, 2


@dataclass(frozen=True)
class FewTiles:
    """What each number of rows runs with.

    One row: codes asked for `prefetch_words` words of a row ahead, in `gemv_streams` places of the weight at once, see
    `streams`; then `several` rows, `few` from FEW_ROWS on. With vectors of 16 lanes up to 12 rows are one panel, and
    the others have `few`.
    """

    prefetch_words: int
    gemv_streams: int
    several: Int8Tile
    few: Int8Tile


def ask_ahead(weight: Weight, ahead: int) -> Ask:
    """Asks for the codes that many words of a row further, and for their scales; 0: for none."""

    def ask(blocks: Sequence[Expr], g: Expr, count: int) -> None:
        for block in blocks if ahead else ():
            for word in range(count):
                prefetch(weight.words, (block, g * count + word + ahead, 0))
            if weight.packed.groups > 1:
                weight.ask_scales(block, g + ahead // count)

    return ask


def ask_for_next(weight: Weight, panel: Expr, panels: Expr) -> Ask:
    """Asks for the next columns: each of the panels that these columns serve asks for its share of the codes.

    If the first asked for all of them, the memory would have nothing to do during the others. Scales are asked for
    too: the hardware follows them only to the end of a page, and waiting there took a quarter of the time with 6 rows.
    Up to `_ASK_SOON` panels have the first ask for what it needs soon.
    """
    soon = ask_ahead(weight, _PREFETCH_WORDS)

    def ask(blocks: Sequence[Expr], g: Expr, count: int) -> None:
        with I.If(panels <= _ASK_SOON):
            with I.Then(), I.If(panel == 0), I.Then():
                soon(blocks, g, count)
            with I.Else():
                words = count * len(blocks)
                share = value((words + panels - 1) // panels)
                at = value(g * words + panel * share)
                with I.serial(0, share) as i:
                    prefetch(weight.words, (blocks[0] + len(blocks), at + i, 0))
                if weight.packed.groups > 1:
                    weight.ask_scales(blocks[0] + len(blocks), g * len(blocks))

    return ask


@dataclass(frozen=True)
class _Tile:
    """A register tile of one panel by the columns of `out`; codes go from packed words to registers.

    `first` is the weight's block of its first columns. Blocks past `last` repeat it; None: there are none. `low_rank`
    is what adapters add. `many`: the numbers are those of `gemm_tile`.
    """

    panels: Panels
    panel: Expr
    weight: Weight
    out: Output
    first: Expr
    last: Expr | None
    ask: Ask
    low_rank: LowRank | None
    many: bool = False

    @property
    def lanes(self) -> int:
        return self.weight.dot.lanes

    @property
    def vectors(self) -> int:
        """Vectors of a row."""
        return self.out.blocks * (LANES // self.lanes)

    def block(self, v: Expr) -> Expr:
        """The weight's block with the v-th vector of columns."""
        block = self.first + v // (LANES // self.lanes) * self.out.apart
        return block if self.last is None else I.min(block, self.last)

    def ask_after(self, g: Expr, count: int) -> None:
        """Emit the prefetches of what comes after group g, of `count` words."""
        self.ask([self.first + b * self.out.apart for b in range(self.out.blocks)], g, count)

    def column(self, v: Expr) -> Expr:
        """Where the v-th vector of columns begins in its block."""
        return v % (LANES // self.lanes) * self.lanes

    def sum(self, total: Registers) -> None:
        """Emit total[r * vectors + v] = the sums of row r and the v-th vector of columns."""
        packed = self.weight.packed
        if not packed.blocked:
            self._sum_groups(total)
        elif self.lanes < LANES and packed.group_size > packed.part and not self.many:
            self._sum_large_groups(total)
        else:
            self._sum_blocks(total)

    def _begin(self, total: Registers) -> None:
        """total = what adapters add, or zeros."""
        with I.unroll(self.out.rows * self.vectors) as i:
            total[i] = splat(0.0, self.lanes)
        if self.low_rank is not None:
            self.low_rank.expand(total, self.out, self.panel)

    @contextmanager
    def _each_of(self, count: int) -> Iterator[Expr]:
        """A loop over groups of 32 columns, and between them prefetches of what adapters need for the next tile."""
        rows = self.out.rows
        if self.low_rank is None:
            with I.serial(count) as g:
                yield g
            return
        pieces = gcd(count, rows)
        with I.serial(pieces) as piece:
            self.low_rank.ask(self.out, piece * (rows // pieces), rows // pieces)
            with I.serial(count // pieces) as i:
                yield piece * (count // pieces) + i

    def _sum_groups(self, total: Registers) -> None:
        """As `sum`, of a format with codes in groups, or one group."""
        groups, weight, rows, vectors = self.panels.groups, self.weight, self.out.rows, self.vectors
        packed, words = weight.packed, groups.size * weight.packed.bits // 32
        sums, word = Sums(weight.dot, rows * vectors, packed.highest), Registers(vectors, self.lanes, "uint32")
        scale, acc = Registers(vectors, self.lanes), sums.total
        self._begin(total)
        with self._each_of(groups.count) as g:
            self.ask_after(g, words)
            with I.unroll(rows) as r, I.unroll(vectors) as v:
                acc[r * vectors + v] = splat(self.panels.corrections[self.panel, g, r], self.lanes)
            with I.serial(words // packed.bits) as part, sums.adding(), I.unroll(packed.bits) as i:
                self._multiply(sums, word, g * words + part * packed.bits + i)
            if packed.groups > 1:
                with I.unroll(vectors) as v:
                    scale[v] = load(weight.scales, (self.block(v), g, self.column(v)), self.lanes)
            with I.unroll(rows) as r, I.unroll(vectors) as v:
                i, factor = r * vectors + v, splat(self.panels.scales[self.panel, g, r], self.lanes)
                if packed.groups > 1:
                    factor = factor * scale[v]
                total[i] = total[i] + I.cast(acc[i], f"float32x{self.lanes}") * factor
        if packed.groups == 1:
            with I.unroll(vectors) as v:
                scale[v] = load(weight.scales, (self.block(v), 0, self.column(v)), self.lanes)
                with I.unroll(rows) as r:
                    total[r * vectors + v] = total[r * vectors + v] * scale[v]

    def _sum_blocks(self, total: Registers) -> None:
        """As `sum`, of a block format: every group of x is scaled. With vectors of 16 lanes memory is the limit."""
        lanes, vectors, parts, panels = self.lanes, self.vectors, 32 // self.weight.packed.part, self.panels
        sums, word, factors = self._block_registers()
        self._begin(total)
        with self._each_of(self.weight.packed.k // 32) as run:
            self._read_run(word, run)
            for part in range(parts):
                g = run * parts + part
                self._read_factors(factors, g)
                self._multiply_part(sums, word, run, part)
                with I.unroll(self.out.rows) as r, I.unroll(vectors) as v:
                    at, x_sum = r * vectors + v, I.cast(panels.corrections[self.panel, g, r], "float32")
                    scaled = self._scaled(I.cast(sums.total[at], f"float32x{lanes}"), factors, v, x_sum)
                    total[at] = total[at] + scaled * splat(panels.scales[self.panel, g, r], lanes)

    def _sum_large_groups(self, total: Registers) -> None:
        """As `_sum_blocks`, of a format whose groups are several of x, which are added before they are scaled."""
        rows, vectors, lanes, packed = self.out.rows, self.vectors, self.lanes, self.weight.packed
        runs, inner, x_sums = packed.group_size // 32, Registers(rows * vectors, lanes), Registers(rows, 1)
        sums, word, factors = self._block_registers()
        self._begin(total)
        with self._each_of(packed.groups) as group:
            with I.unroll(rows) as r:
                x_sums[r] = I.float32(0)
                with I.unroll(vectors) as v:
                    inner[r * vectors + v] = splat(0.0, lanes)
            with I.serial(runs) as i:
                run = group * runs + i
                self._read_run(word, run)
                self._multiply_part(sums, word, run, 0)
                with I.unroll(rows) as r:
                    x = self.panels.scales[self.panel, run, r]
                    if packed.shifted:
                        x_sums[r] = x_sums[r] + I.cast(self.panels.corrections[self.panel, run, r], "float32") * x
                    with I.unroll(vectors) as v:
                        at = r * vectors + v
                        inner[at] = inner[at] + I.cast(sums.total[at], f"float32x{lanes}") * splat(x, lanes)
            self._read_factors(factors, group * runs)
            with I.unroll(rows) as r, I.unroll(vectors) as v:
                at = r * vectors + v
                total[at] = total[at] + self._scaled(inner[at], factors, v, x_sums[r])

    def _block_registers(self) -> tuple[Sums, Registers, Registers]:
        """Sums, the words of 32 columns, and two factors for each vector of columns."""
        packed, vectors, lanes = self.weight.packed, self.vectors, self.lanes
        sums = Sums(self.weight.dot, self.out.rows * vectors, 255 if self._signed else packed.highest)
        return sums, Registers(vectors * packed.bits, lanes, "uint32"), Registers(2 * vectors, lanes)

    def _read_run(self, word: Registers, run: Expr) -> None:
        """word = the words of 32 columns, those of a vector of columns after the other."""
        bits = self.weight.packed.bits
        self.ask_after(run, bits)
        with I.unroll(self.vectors) as v, I.unroll(bits) as i:
            at = (self.block(v), run * bits + i, self.column(v))
            word[v * bits + i] = read(self.weight.words, at, self.lanes)

    def _read_factors(self, factors: Registers, g: Expr) -> None:
        """factors[2 v], [2 v + 1] = the scales of group g of x, and the zero points or minima of bytes."""
        weight, packed, shift = self.weight, self.weight.packed, byte_shift(self.weight)
        with I.unroll(self.vectors) as v:
            at, scale, shifted = (self.block(v), g, self.column(v)), v * 2, v * 2 + 1
            factors[scale] = scale_of(packed, weight.scales, weight.subs, at, 0, self.lanes)
            if packed.zeros:
                factors[shifted] = zero_of(packed, weight.subs, at, self.lanes) - splat(float(shift), self.lanes)
            elif packed.minima:
                factors[shifted] = scale_of(packed, weight.scales, weight.subs, at, 1, self.lanes)
                if shift:
                    factors[shifted] = factors[shifted] + factors[scale] * splat(float(shift), self.lanes)

    def _scaled(self, sums: Expr, factors: Registers, v: Expr, x_sum: Expr) -> Expr:
        """Sums of codes times x as those of the v-th vector of columns; `x_sum` is the sum of x."""
        if self.weight.packed.zeros:  # whole numbers below 2**24, but for sums over several groups of x
            sums = sums - factors[v * 2 + 1] * splat(x_sum, self.lanes)
        sums = sums * factors[v * 2]
        return sums + factors[v * 2 + 1] * splat(x_sum, self.lanes) if self.weight.packed.minima else sums

    def _multiply_part(self, sums: Sums, word: Registers, run: Expr, part: int) -> None:
        """sums = the products of a part of 32 columns."""
        rows, vectors, parts = self.out.rows, self.vectors, 32 // self.weight.packed.part
        with I.unroll(rows) as r, I.unroll(vectors) as v:
            shifted = self.weight.packed.shifted
            start = I.int32(0) if shifted else self.panels.corrections[self.panel, run * parts + part, r]
            sums.total[r * vectors + v] = splat(start, self.lanes)
        self._multiply_codes(sums, word, run, range(8 // parts * part, 8 // parts * (part + 1)))

    @property
    def _signed(self) -> bool:
        """Whether bytes of a block format have signs."""
        packed = self.weight.packed
        return packed.bits == 8 or (bool(packed.table) and self.weight.dot.levels(packed)[1] == 0)

    def _multiply_codes(self, sums: Sums, word: Registers, run: Expr, steps: range) -> None:
        """sums += the products of some of the 8 vectors of codes of 32 columns."""
        bits, vectors, room = self.weight.packed.bits, self.vectors, sums.room or len(steps)
        for first in range(0, len(steps), room):
            with sums.adding():
                for t in steps[first : first + room]:
                    with I.unroll(self.out.rows) as r, I.unroll(vectors) as v:
                        codes = codes_of(self.weight, partial(_word, word, v * bits), t)
                        x = self.panels.words[self.panel, run * 8 + t, r]
                        sums.add(r * vectors + v, codes, x, 8 if self._signed else 4)

    def _multiply(self, sums: Sums, word: Registers, j: Expr) -> None:
        """sums += the products of the j-th word of each column."""
        packed, dot, vectors = self.weight.packed, self.weight.dot, self.vectors
        parts = 8 // packed.bits
        with I.unroll(vectors) as v:
            word[v] = read(self.weight.words, (self.block(v), j, self.column(v)), self.lanes)
        with I.unroll(parts) as part, I.unroll(self.out.rows) as r, I.unroll(vectors) as v:
            codes = dot.codes(word[v], packed.bits, part, packed.zero_point)
            x = self.panels.words[self.panel, j * parts + part, r]
            sums.add(r * vectors + v, codes, x, packed.bits)


def _word(words: Registers, first: Expr, i: int) -> Expr:
    return words[first + i]


def direct_tile(
    panels: Panels,
    panel: Expr,
    weight: Weight,
    out: Output,
    ask: Ask,
    expert: Expr | None = None,
    low_rank: LowRank | None = None,
    many: bool = False,
) -> None:
    """Emit a register tile from its panel to y; `expert`: its weight is one of several, one after the other."""
    first, blocks = out.block, weight.packed.blocks
    last = blocks - 1
    if expert is not None:
        first, last = expert * blocks + first, expert * blocks + blocks - 1
    total = Registers(out.rows * out.blocks * (LANES // weight.dot.lanes), weight.dot.lanes)
    _Tile(panels, panel, weight, out, first, last if blocks % out.blocks else None, ask, low_rank, many).sum(total)
    out.store(total)


def _direct(
    X: Buffer, weight: Weight, Y: Buffer, m: Expr, tile: Int8Tile, groups: Groups, adapters: Int8Adapters | None
) -> None:
    """Decode rows: every panel unpacks all codes, and prefetches its share of those of the next columns."""
    cover, panels = cover_rows(m, groups, tile.rows, tile.tail_rows)
    low_rank = None
    if adapters is not None:
        low_rank = adapters.quantize(X, cover, panels)
    else:
        with I.parallel(groups.count) as g, I.serial(cover.panels) as p, I.serial(cover.rows_of(p)) as r:
            quantize_group(X, cover.row(p, r), g, panels, p, r)
    with I.parallel(-(-weight.packed.blocks // tile.blocks)) as t:
        for panel, row, rows in cover.tiles():
            out = Output(Y, row, m, t * tile.blocks, rows, tile.blocks)
            direct_tile(panels, panel, weight, out, ask_for_next(weight, panel, cover.panels), low_rank=low_rank)


def _one_panel(
    X: Buffer, weight: Weight, Y: Buffer, m: Expr, rows: int, groups: Groups, adapters: Int8Adapters | None
) -> None:
    """Up to `rows` rows: one panel, one block of columns after the other, as memory has them."""
    panels, blocks, low_rank = alloc_panels(groups, 1, rows), weight.packed.blocks, None
    if adapters is not None:
        low_rank = adapters.quantize(X, one_panel(m, rows), panels)
    else:
        with I.parallel(groups.count) as g, I.serial(rows) as r:
            quantize_group(X, I.min(r, m - 1), g, panels, 0, r)
    with I.parallel(blocks) as t:
        out = Output(Y, 0, m, t, rows, 1)
        direct_tile(panels, 0, weight, out, ask_ahead(weight, _PREFETCH_WORDS), low_rank=low_rank)


def few_of_many(X: Buffer, weight: Weight, Y: Buffer, m: Expr, groups: Groups, ahead: int) -> None:
    """Emit y = x W^T for m <= FEW_OF_MANY with the numbers of `gemm`, whose scratch pays where several panels read it.

    A chat's first prompt after a load, and what a chat adds to a cached one, may be as short as this.
    """
    panels = alloc_panels(groups, 1, FEW_OF_MANY)
    with I.serial(groups.count) as g, I.serial(FEW_OF_MANY) as r:
        quantize_group(X, I.min(r, m - 1), g, panels, 0, r)
    with I.parallel(weight.packed.blocks) as t:
        out = Output(Y, 0, m, t, FEW_OF_MANY, 1)
        direct_tile(panels, 0, weight, out, ask_ahead(weight, ahead), many=True)


def several_rows(
    X: Buffer,
    weight: Weight,
    Y: Buffer,
    m: Expr,
    tiles: FewTiles,
    groups: Groups,
    adapters: Adapters | None = None,
) -> None:
    """Emit y = x W^T from two rows on: in one panel where one holds them, else with the tile of several or of few."""
    low_rank = None if adapters is None else Int8Adapters(adapters, weight.dot, groups, m)

    def panels() -> None:
        if tiles.several == tiles.few or heights:
            return _direct(X, weight, Y, m, tiles.few, groups, low_rank)
        with I.If(m < I.int64(FEW_ROWS)):
            with I.Then():
                _direct(X, weight, Y, m, tiles.several, groups, low_rank)
            with I.Else():
                _direct(X, weight, Y, m, tiles.few, groups, low_rank)

    def up_to(heights: tuple[int, ...]) -> None:
        if not heights:
            return panels()
        with I.If(m <= I.int64(heights[0])):
            with I.Then():
                _one_panel(X, weight, Y, m, heights[0], groups, low_rank)
            with I.Else():
                up_to(heights[1:])

    heights = ONE_PANEL if weight.dot.lanes == LANES else ()
    up_to(heights)


def one_row(
    X: Buffer, weight: Weight, Y: Buffer, tiles: FewTiles, groups: Groups, adapters: Adapters | None = None
) -> None:
    """Emit y = x W^T of one row: the packed weight is read once, in `streams`."""
    panels, low_rank = alloc_panels(groups, 1, 1), None
    together, apart = streams(weight, tiles)
    if adapters is not None:
        low_rank = Int8Adapters(adapters, weight.dot, groups, 1).quantize(X, one_panel(1, 1), panels)
    else:
        with I.serial(groups.count) as g:
            quantize_group(X, 0, g, panels, 0, 0)
    with I.parallel(apart) as t:
        out = Output(Y, 0, 1, t, 1, together, apart=apart)
        direct_tile(panels, 0, weight, out, ask_ahead(weight, tiles.prefetch_words), low_rank=low_rank)


def streams(weight: Weight, tiles: FewTiles) -> tuple[int, int]:
    """In how many places a thread reads the weight at once, and how many blocks of 16 columns they are apart.

    Hardware follows each place to the end of a page. One core of a Xeon (Sapphire Rapids) read 9.0 GB/s of
    4-bit codes in one place, 13.0 in two, in two next to each other 11.5; two cores 17.1, 23.6 and 21.1 (2026-11-29).
    """
    together = min(tiles.gemv_streams, weight.packed.blocks)
    return together, -(-weight.packed.blocks // together)
