"""Attention of a block of query rows to blocks of keys: scores, online softmax, weighted sum of values.

Softmax is online (Milakov & Gimelshein 2018; FlashAttention, Dao et al. 2022), in base 2: queries carry log2(e). The
query heads that share a KV head (GQA) are rows of one block. A score tile is some rows by 16 keys of up to 4 pages,
an output tile some rows by some vectors of the head dimension; both live in registers.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr, put
from tir_schedules.cpu.attention.keys import BLOCK, Keys
from tir_schedules.cpu.attention.pages import AttentionShape
from tir_schedules.cpu.vectors import exp2, largest, load, load_packed, read, scratch, splat, store, value
from tir_schedules.paged import PAGE
from tir_schedules.rule import Knobs

LOG2E = math.log2(math.e)
MASKED = -3e38
MAX_POWER = 126.0  # of two, that `exp2` computes
LOWEST = -1e30  # the largest score of a row that saw no key; merging gives it no weight


@dataclass(frozen=True)
class Tiles:
    """How many vectors of 16 float32 a register tile accumulates, and the rows of a tile.

    A score tile of a prompt is `max_rows` rows x 4 pages: 16 accumulators leave room for operands in the 32 registers
    of AVX-512 (24 were 5 to 10 % slower); with shorter vectors LLVM splits a vector over registers.

    `task_rows`: rows (queries times heads of a group) of one task of a prompt. `part_pages`: decoding splits the keys
    of a sequence among threads in parts of so many pages or more (4 took up to 1.6 times as long on two threads).
    """

    accumulators: int = 24
    max_rows: int = 8
    task_rows: int = 64
    part_pages: int = 16

    def segments(self, rows: int) -> list[tuple[int, int, int]]:
        """`rows` as (first row, rows of a tile, tiles): equal tiles, and one smaller where they do not divide."""
        count = -(-rows // self.max_rows)
        size = -(-rows // count)
        whole = rows // size
        rest = rows - whole * size
        return [(0, size, whole)] + ([(whole * size, rest, 1)] if rest else [])


def chosen(names: Mapping[str, str], knobs: Knobs) -> dict[str, int]:
    """Fields of `Tiles` -> what knobs say; `names`: field -> knob."""
    return {field: int(knobs[name]) for field, name in names.items() if name in knobs}


def with_sink(total: Expr, top: Expr, sinks: Sequence[Buffer], head: Expr) -> Expr:
    """A sum of weights relative to 2**top, with that of a head's sink if there is one (Xiao et al. 2023; gpt-oss).

    A sink of 126 powers of two above all scores takes all weight to float32's accuracy, and so does a higher one.
    """
    for sink in sinks:
        power = value(I.min(sink[head] * I.float32(LOG2E) - top, I.float32(MAX_POWER)))
        return total + exp2(power, 1)
    return total


Seen = Callable[[Expr], tuple[Expr, Expr]]  # of a row: the first and the last key of the block that it sees


@dataclass(frozen=True)
class BlockPart:
    """What rows see of a block of keys.

    The first `skipped` tiles see nothing; the rows of the tile that begins at `row` see no keys but reach(row, size)[0]
    to reach(row, size)[1] - 1.
    """

    seen: Seen
    reach: Callable[[Expr, int], tuple[Expr, Expr]]
    skipped: Expr


class Rows:
    """The softmax state of `rows` query rows, and the emitters that fold keys into it.

    Buffers, all float32: q [row tile][D][rows of the tile], scaled; p [groups of V][rows][64]; out [rows, v_dim];
    top and alpha [rows]; sums [rows, 16] by lane.
    """

    def __init__(self, shape: AttentionShape, rows: int, tiles: Tiles, scaled: bool) -> None:
        self.shape, self.rows, self.tiles = shape, rows, tiles
        self.segments = tiles.segments(rows)
        self.groups, self.v_groups = (shape.scale_groups, shape.v_scale_groups) if scaled else (0, 0)
        self.padded = -(-rows // 16) * 16
        self.q = scratch(rows * shape.head_dim)
        self.p = scratch(max(1, self.v_groups) * rows * BLOCK)
        self.out = scratch(rows * shape.v_dim)
        self.top, self.alpha, self.next = scratch(self.padded), scratch(self.padded), scratch(self.padded)
        self.sums = scratch(rows * 16)

    def each_tile(self, emit: Callable[[Expr, int], None], used: Expr | None = None, skipped: Expr = 0) -> None:
        """emit(first row, rows of the tile) for every tile; only those that begin before `used` rows.

        `skipped` whole tiles at the beginning are left out, where all tiles are equal.
        """
        for begin, size, count in self.segments:
            if count == 1:
                emit(begin, size)
            else:
                bound = count if used is None else I.min((used - begin + size - 1) // size, count)
                with I.serial(skipped, bound) as t:
                    emit(begin + t * size, size)

    def begin(self) -> None:
        """No key seen."""
        for v in range(self.padded // 16):
            store(self.top, v * 16, splat(LOWEST, 16), 16)
            store(self.next, v * 16, splat(LOWEST, 16), 16)
        with I.serial(0, self.rows) as r:
            store(self.sums, r * 16, splat(0.0, 16), 16)
            with I.serial(0, self.shape.v_dim // self.shape.lanes) as i:
                at = r * self.shape.v_dim + i * self.shape.lanes
                store(self.out, at, splat(0.0, self.shape.lanes), self.shape.lanes)

    def load_query(self, Q: Buffer, source: Callable[[Expr], Expr], scale: Expr, used: Expr | None = None) -> None:
        """q of row r = scaled Q[source(r) : source(r) + D]; rows past `used` are zero."""
        dim, softcap = self.shape.head_dim, self.shape.softcap
        factor = value(scale * I.float32(LOG2E if softcap == 0.0 else 1.0 / softcap))

        def tile(row: Expr, size: int) -> None:
            for r in range(size):
                with I.serial(0, dim) as d:
                    item = Q[source(row + r) + d] * factor
                    if used is not None:
                        item = I.if_then_else(row + r < used, item, I.float32(0))
                    put(self.q, (row * dim) + d * size + r, item)

        self.each_tile(tile, used)

    def attend(self, keys: Keys, seen: Seen | None, used: Expr | None = None) -> None:
        """Fold the keys of len(keys.k) pages in; row r sees those of index seen(r)[0] to seen(r)[1], or all."""
        pages = len(keys.k)
        self.each_tile(lambda row, size: self._scores(keys, row, size), used)
        self._softmax(keys, pages, seen, used)
        self.each_tile(lambda row, size: self._weigh(keys, row, size), used)

    def attend_part(self, keys: Keys, part: BlockPart, used: Expr) -> None:
        """As `attend`, of a block of which rows see different parts: the same bits as if the others were 2**-inf."""
        skipped = value(part.skipped)

        def scores(row: Expr, size: int) -> None:
            _, end = part.reach(row, size)
            half = len(keys.k) // 2
            for first in (0, half):
                with I.If(end > first * PAGE), I.Then():
                    self._score_pages(keys, row, size, range(first, first + half))

        self.each_tile(scores, used, skipped)
        self._softmax(keys, len(keys.k), part.seen, used, skipped * self.segments[0][1], exact=True)
        self.each_tile(lambda row, size: self._weigh(keys, row, size, part.reach(row, size)), used, skipped)

    def _scores(self, keys: Keys, row: Expr, size: int) -> None:
        """p[row : row + size] = q K^T."""
        pages = len(keys.k)
        step = max(1, min(pages, self.tiles.accumulators // size))
        for first in range(0, pages, step):
            self._score_pages(keys, row, size, range(first, min(first + step, pages)))

    def _score_pages(self, keys: Keys, row: Expr, size: int, some: range) -> None:
        """p[row : row + size] = q K^T for some pages of the block."""
        dim = self.shape.head_dim
        acc = {(r, i): scratch(16) for r in range(size) for i in some}
        groups = max(1, self.groups)
        depth = dim // groups // keys.packed  # rows of elements
        unroll = next(n for n in (4, 2, 1) if depth % n == 0)
        with I.serial(0, groups) as g:
            for a in acc.values():
                store(a, 0, splat(0.0, 16), 16)
            with I.serial(0, depth // unroll) as j:
                for u in range(unroll):
                    at = (g * depth if groups > 1 else 0) + j * unroll + u
                    columns = {i: [value(k) for k in keys.k_rows(i, at)] for i in some}
                    for part, r in itertools.product(range(keys.packed), range(size)):
                        q = value(splat(self.q[row * dim + (at * keys.packed + part) * size + r], 16))
                        for i in some:
                            store(acc[r, i], 0, read(acc[r, i], 0, 16) + q * columns[i][part], 16)
                if keys.fetch is not None:
                    for i, u in itertools.product(some, range(0, unroll * PAGE, keys.line)):
                        keys.fetch(i, ((g * depth if groups > 1 else 0) + j * unroll) * PAGE + u, 0)
            for (r, i), a in acc.items():
                score, at = read(a, 0, 16), (row + r) * BLOCK + i * PAGE
                if keys.scale is not None:
                    score = score * load(keys.scales, keys.scale(i, g, 0), 16)
                if groups > 1:
                    with I.If(g == 0):
                        with I.Then():
                            store(self.p, at, score, 16)
                        with I.Else():
                            store(self.p, at, score + read(self.p, at, 16), 16)
                else:
                    store(self.p, at, score, 16)

    def _softmax(
        self,
        keys: Keys,
        pages: int,
        seen: Seen | None,
        used: Expr | None,
        first_row: Expr = 0,
        exact: bool = False,
    ) -> None:
        """p = 2**(p - the row's largest so far); alpha rescales what was summed before.

        `exact`: p of what a row does not see is 0, and not only less than 2**-125.
        """
        rows = self.rows if used is None else used
        with I.serial(first_row, rows) as r:
            scores = []
            for i in range(pages):
                score = read(self.p, r * BLOCK + i * PAGE, 16)
                if self.shape.softcap:
                    score = self._cap(score)
                if keys.biases is not None:
                    score = score + keys.biases(r, i) * splat(LOG2E, 16)
                if seen is not None:
                    first, last = seen(r)
                    index = I.ramp(i * PAGE, 1, 16)
                    inside = I.And(index >= I.broadcast(first, 16), index <= I.broadcast(last, 16))
                    score = I.Select(inside, score, splat(MASKED, 16))
                scores.append(value(score))
                if self.shape.softcap or seen is not None or keys.biases is not None:
                    store(self.p, r * BLOCK + i * PAGE, scores[-1], 16)
            put(self.next, r, I.max(self.top[r], largest(functools.reduce(I.max, scores), 16)))
        with I.serial(0, (rows + 15) // 16) as v:
            store(self.alpha, v * 16, exp2(read(self.top, v * 16, 16) - read(self.next, v * 16, 16), 16), 16)
            store(self.top, v * 16, read(self.next, v * 16, 16), 16)
        with I.serial(first_row, rows) as r:
            top = value(splat(self.top[r], 16))
            weights = [self._weight(r * BLOCK + i * PAGE, top, exact) for i in range(pages)]
            scaled = read(self.sums, r * 16, 16) * splat(self.alpha[r], 16)
            store(self.sums, r * 16, scaled + functools.reduce(operator.add, weights), 16)
            for i, weight in enumerate(weights):
                for g in range(max(1, self.v_groups)):
                    factor = weight if keys.scale is None else weight * load(keys.scales, keys.scale(i, g, 1), 16)
                    store(self.p, (g * self.rows + r) * BLOCK + i * PAGE, factor, 16)

    def _weight(self, at: Expr, top: Expr, exact: bool) -> Expr:
        """2**(p - top) for 16 keys; NaN stays NaN."""
        weight = value(exp2(read(self.p, at, 16) - top, 16))
        if not exact:
            return weight
        return value(I.Select(read(self.p, at, 16) <= splat(MASKED / 2, 16), splat(0.0, 16), weight))

    def _cap(self, score: Expr) -> Expr:
        """cap * tanh(s / cap) in base 2, with tanh(y) = 1 - 2 / (2**(2 y log2 e) + 1); q carries 1 / cap."""
        bounded = I.min(splat(20.0, 16), I.max(splat(-20.0, 16), score)) * splat(2 * LOG2E, 16)  # as b, NaN stays
        tanh = splat(1.0, 16) - splat(2.0, 16) / (exp2(bounded, 16) + splat(1.0, 16))
        return value(tanh * splat(self.shape.softcap * LOG2E, 16))

    def _weigh(self, keys: Keys, row: Expr, size: int, reach: tuple[Expr, Expr] | None = None) -> None:
        """out[row : row + size] = alpha out + p V, of keys reach[0] ... reach[1] - 1 of the block; None: all."""
        dim, lanes = self.shape.v_dim, self.shape.lanes
        group_vectors = dim // max(1, self.v_groups) // lanes
        width = max(1, min(group_vectors, 4, self.tiles.accumulators // size))
        for g in range(max(1, self.v_groups)):
            for begin in range(0, group_vectors, width):
                vectors = range(begin, min(begin + width, group_vectors))
                acc = {(r, v): scratch(lanes) for r in range(size) for v in vectors}
                where = {v: (g * group_vectors + v) * lanes for v in vectors}
                for (r, v), a in acc.items():
                    old = read(self.out, (row + r) * dim + where[v], lanes)
                    store(a, 0, old * splat(self.alpha[row + r], lanes), lanes)
                for i, base in enumerate(keys.v):
                    begin_slot, slots = 0, PAGE if keys.valid is None else keys.valid
                    if reach is not None:
                        begin_slot, slots = (I.max(0, I.min(slot - i * PAGE, PAGE)) for slot in reach)
                    with I.serial(begin_slot, slots) as slot:
                        weights = [
                            value(splat(self.p[(g * self.rows + row + r) * BLOCK + i * PAGE + slot], lanes))
                            for r in range(size)
                        ]
                        for v in vectors:
                            at, part = keys.v_at(self.shape, slot, where[v])
                            item = value(load_packed(keys.v_elements, base + at, lanes, keys.packed)[part])
                            for r in range(size):
                                store(acc[r, v], 0, read(acc[r, v], 0, lanes) + weights[r] * item, lanes)
                            if keys.fetch is not None and (v == vectors[0] or where[v] % keys.line == 0):
                                keys.fetch(i, at, 1)
                for (r, v), a in acc.items():
                    store(self.out, (row + r) * dim + where[v], read(a, 0, lanes), lanes)
