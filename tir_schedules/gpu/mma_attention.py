"""Prefill attention on matrix units: scores and weighted values as products of 16 x 16 by 16 x 8 numbers.

Dao (2023), "FlashAttention-2": a subgroup has 16 rows (queries times heads of a group), its sums stay in registers
while it walks over blocks of keys, and the weights of a block go from the layout of sums to that of factors without
leaving the lane. `mma_matmul.py` says which numbers of a matrix a lane has: g = lane / 4, t = lane % 4. Which key is
which row of a factor does not matter, nor which dimension which column, if both factors agree; so a lane loads what
lies side by side and turns pairs around:
- of 16 keys, those with even numbers are one product's, the others the next one's: two keys are one word of a page,
  where K lies transposed; then a lane's weights are of the keys 4t, 4t + 2, 4t + 1, 4t + 3;
- of V a lane loads `wide` neighbours of these four keys, which are `wide` products.
The subgroups of a workgroup share keys: each turns its part of a block and puts it in shared memory as lanes want it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from tvm.script.ir_builder import tirx as I

from tir_schedules.gpu import device_calls
from tir_schedules.gpu.kernel import LOWEST, Buffer, Expr, barrier, ceildiv, keep, local, pin, put, shared
from tir_schedules.gpu.kv_pages import AttentionShape
from tir_schedules.gpu.octets import neighbours, put_neighbours
from tir_schedules.gpu.prefill_tile import PrefillTile, Tile
from tir_schedules.gpu.scores import score_of

SUBGROUPS = 4  # of a workgroup
TALL = 16  # rows of a subgroup
KEYS = 16  # that products go over at once
TILE = PrefillTile(threads=32 * SUBGROUPS, rows=TALL * SUBGROUPS)
_STAGED = 256  # numbers of a key times blocks of 16 keys: 16 KiB of shared memory
_MOST_BLOCKS = 4
_KEPT = 8  # steps whose queries are registers, beside the sums; more are in shared memory
_OF_WEIGHTS = (0, 2, 1, 3)  # keys 4t + ..., in the order in which a lane has them


def fits(shape: AttentionShape, knobs: Mapping[str, int | str]) -> str:
    """"" or why products cannot have these heads."""
    if not int(knobs.get("mma", 0)) or shape.subgroup != 32:
        return "no matrix units"
    return "" if shape.dtype == "float16" and shape.head_dim % KEYS == 0 else f"heads of {shape.head_dim} {shape.dtype}"


@dataclass(frozen=True)
class Keys:
    """What a tile attends to: tokens `begin` ... `end` - 1 of a sequence, `begin` a multiple of 16.

    `k(token0, step, g, t)` gives what a lane has of the 16 keys from token0 in columns of `width` dimensions: of each
    16 of these the words of both products; `v(token)` is the index of a key's values, of words. `pairs`: a lane has the
    columns 2t, 2t + 1, 2t + 8 and 2t + 9 of 16, else 8t ... 8t + 7 of 32. `seen(query, token)`: as `prefill_tile.py`.
    """

    begin: Expr
    end: Expr
    k: Callable[[Expr, Expr, Expr, Expr], list[list[Expr]]]
    v: Callable[[Expr], Expr]
    values: Buffer
    seen: Callable[[Expr, Expr], Expr]
    pairs: bool

    @property
    def width(self) -> int:
        return KEYS if self.pairs else 2 * KEYS


@dataclass(frozen=True)
class _Work:
    """A tile, and where a subgroup's lane is in it. `stage`: shared words."""

    tile: Tile
    keys: Keys
    scale: Expr
    stage: Buffer
    g: Expr
    t: Expr
    subgroup: Expr

    @property
    def dim(self) -> int:
        return self.tile.shape.head_dim

    @property
    def steps(self) -> int:
        """Products over the dimensions; as many as pairs of products over keys."""
        return self.dim // KEYS

    @property
    def blocks(self) -> int:
        """Of 16 keys, between two barriers."""
        return max(1, min(_MOST_BLOCKS, _STAGED // self.dim))

    @property
    def wide(self) -> int:
        """Neighbours of V that a lane loads."""
        return next(count for count in (8, 4, 2) if self.dim % (8 * count) == 0)

    @cached_property
    def scores(self) -> Buffer:
        return local(self.blocks * 2 * 4)

    @cached_property
    def sums(self) -> Buffer:
        return local(self.steps * 2 * 4)

    @cached_property
    def queries(self) -> Buffer:
        """The left factors, [step, 4]."""
        return local(self.steps * 4, "uint32")

    @cached_property
    def shared_queries(self) -> Buffer | None:
        """Those of all lanes, [subgroup, step, lane, 4], where they are too many for registers."""
        return None if self.steps <= _KEPT else shared(SUBGROUPS * self.steps * 128, "uint32")

    @cached_property
    def top(self) -> Buffer:
        """The largest score of the lane's two rows."""
        return local(2)

    @cached_property
    def whole(self) -> Buffer:
        """The sum of weights of the lane's keys."""
        return local(2)

    def row(self, part: int) -> Expr:
        return self.subgroup * TALL + self.g + 8 * part

    def load_queries(self, words: Buffer) -> None:
        """Of rows g and g + 8; rows that do not exist are never stored."""
        shape = self.tile.shape
        for part in range(2):
            query = I.max(I.min(self.tile.query(self.row(part)), self.tile.queries - 1), 0)
            row = (self.tile.first + query) * shape.num_heads + self.tile.head(self.row(part))
            line = keep(row * (self.dim // 2))
            for step in range(0, self.steps, self.keys.width // KEYS):
                first = line + step * (KEYS // 2)
                if self.keys.pairs:
                    found = [words[first + self.t], words[first + self.t + 4]]
                else:
                    found = neighbours(words, first + self.t * 4, 4)
                for i, word in enumerate(found):
                    put(self.queries, (step + i // 2) * 4 + i % 2 * 2 + part, word)
        if self.shared_queries is not None:
            for step in range(self.steps):
                put_neighbours(self.shared_queries, self._own(step), [self.queries[step * 4 + i] for i in range(4)])

    def _own(self, step: int) -> Expr:
        return ((self.subgroup * self.steps + step) * 32 + self.g * 4 + self.t) * 4

    def load_keys(self, token0: Expr) -> None:
        """K and V of the next blocks, to shared memory."""
        parts = self.dim // self.keys.width
        self._share(self.blocks * parts, lambda job: self._stage_k(token0, job // parts, job % parts))
        groups = self.dim // (8 * self.wide)
        self._share(self.blocks * groups, lambda job: self._stage_v(token0, job // groups, job % groups))

    def _share(self, jobs: int, body: Callable[[Expr], None]) -> None:
        for first in range(0, jobs, SUBGROUPS):
            job = keep(first + self.subgroup)
            if first + SUBGROUPS <= jobs:
                body(job)
                continue
            with I.If(job < jobs), I.Then():
                body(job)

    def _stage_k(self, token0: Expr, block: Expr, part: Expr) -> None:
        found = self.keys.k(keep(token0 + block * KEYS), part, self.g, self.t)
        for i, words in enumerate(found):
            self._put(block * self.steps + part * len(found) + i, words)

    def _stage_v(self, token0: Expr, block: Expr, group: Expr) -> None:
        last, half = self.keys.end - 1, self.wide // 2
        rows = []
        for i in _OF_WEIGHTS:
            token = keep(I.min(token0 + block * KEYS + self.t * 4 + i, last))  # what lies beyond is no number
            first = self.keys.v(token) + group * (8 * half) + self.g * half
            rows.append(neighbours(self.keys.values, first, half) if half > 1 else [self.keys.values[first]])
        for m in range(half):
            a, b, c, d = (row[m] for row in rows)
            lows = device_calls.low_halves(a, b), device_calls.low_halves(c, d)
            words = [*lows, device_calls.high_halves(a, b), device_calls.high_halves(c, d)]
            self._put((self.blocks + block) * self.steps + group * half + m, words)

    def _put(self, unit: Expr, words: list[Expr]) -> None:
        put_neighbours(self.stage, keep((unit * 32 + self.g * 4 + self.t) * 4), words)

    def _staged(self, unit: int) -> list[Expr]:
        return neighbours(self.stage, (unit * 32 + self.g * 4 + self.t) * 4, 4)

    def multiply_keys(self) -> None:
        """Scores of the lane's rows and keys, neither scaled nor masked."""
        for i in range(self.blocks * 8):
            put(self.scores, i, 0.0)
        for step in range(self.steps):
            if self.shared_queries is None:
                left = [self.queries[step * 4 + i] for i in range(4)]
            else:
                left = neighbours(self.shared_queries, self._own(step), 4)
            for block in range(self.blocks):
                words = self._staged(block * self.steps + step)
                for product in range(2):
                    at = (block * 2 + product) * 4
                    device_calls.mma(self.scores, at, left, words[2 * product : 2 * product + 2])

    def weigh(self, token0: Expr) -> None:
        """Scores become weights relative to the largest so far; what there was shrinks with it."""
        keys = self.keys
        for part in range(2):
            query, best = keep(self.tile.query(self.row(part))), local(1)
            put(best, 0, self.top[part])
            for at, token in self._lane_keys(part, token0):
                seen = I.And(token < keys.end, keys.seen(query, token))
                score = score_of(self.tile.shape, self.scores[at], self.scale)
                put(self.scores, at, I.if_then_else(seen, score, I.float32(LOWEST)))
                put(best, 0, I.max(best[0], self.scores[at]))
            top = pin(self._of_row(best[0], I.max))
            shrink = pin(I.exp2(self.top[part] - top))
            put(self.top, part, top)
            put(self.whole, part, self.whole[part] * shrink)
            for at, _ in self._lane_keys(part, token0):
                score = self.scores[at]
                put(self.scores, at, I.if_then_else(score > I.float32(LOWEST), I.exp2(score - top), I.float32(0)))
                put(self.whole, part, self.whole[part] + self.scores[at])
            for i in range(self.steps * 2):
                for j in range(2):
                    at = i * 4 + part * 2 + j
                    put(self.sums, at, self.sums[at] * shrink)

    def _lane_keys(self, part: int, token0: Expr) -> list[tuple[int, Expr]]:
        """Of a row: where each score is, and its token."""
        return [
            ((block * 2 + product) * 4 + part * 2 + i, token0 + (block * KEYS + 2 * i + product) + self.t * 4)
            for block in range(self.blocks)
            for product in range(2)
            for i in range(2)
        ]

    @staticmethod
    def _of_row(value: Expr, combine: Callable[[Expr, Expr], Expr]) -> Expr:
        """A value of the four lanes of a row, combined."""
        for mask in (1, 2):
            value = pin(value)
            value = combine(value, device_calls.subgroup_shuffle_xor(value, I.int32(mask)))
        return value

    def multiply_values(self) -> None:
        """Add the weighted values."""
        for block in range(self.blocks):
            at = block * 8
            order = (0, 2, 4, 6)  # rows g and g + 8 of one product over keys, then of the other
            left = [pin(device_calls.half_pair(self.scores[at + i], self.scores[at + i + 1])) for i in order]
            for unit in range(self.steps):
                words = self._staged((self.blocks + block) * self.steps + unit)
                for product in range(2):
                    device_calls.mma(self.sums, (unit * 2 + product) * 4, left, words[2 * product : 2 * product + 2])

    def store(self, out: Buffer, flat: Buffer, lse: Buffer) -> None:
        """Means and sums of the rows that exist."""
        shape = self.tile.shape
        for part in range(2):
            total = pin(I.max(self._of_row(self.whole[part], lambda a, b: a + b), I.float32(1e-37)))
            with I.If(self.tile.inside(self.row(part))), I.Then():
                target = keep(self.tile.first + self.tile.query(self.row(part)))
                head = keep(self.tile.head(self.row(part)))
                line = (target * shape.num_heads + head) * (self.dim // 2)
                for group in range(self.dim // (8 * self.wide)):
                    self._store_group(flat, keep(line + group * (4 * self.wide)), group, part, total)
                with I.If(self.t == 0), I.Then():
                    put(lse, (target, head), self.top[part] + I.log2(total))

    def _store_group(self, flat: Buffer, first: Expr, group: int, part: int, total: Expr) -> None:
        """2 `wide` neighbours: column 2t of each product, then 2t + 1."""
        values = [
            self.sums[((group * self.wide + j) * 4) + part * 2 + i] / total for i in range(2) for j in range(self.wide)
        ]
        words = [device_calls.half_pair(*values[n : n + 2]) for n in range(0, len(values), 2)]
        for n in range(0, len(words), 4):
            some = words[n : n + 4]
            put_neighbours(flat, first + self.t * self.wide + n, some)


def attend(tile: Tile, keys: Keys, q: Buffer, out: Buffer, lse: Buffer, scale: Expr, rows: Expr) -> None:
    """out = weighted mean of the values that each row sees, lse = log2 of its sum of 2**score. `rows`: of q, out."""
    lane, size = keep(device_calls.lane()), rows * (tile.shape.num_heads * tile.shape.head_dim // 2)
    I.evaluate(device_calls.require_size(32))
    words, flat = (I.decl_buffer((size,), "uint32", data=x.data) for x in (q, out))
    place = keep(lane // 4), keep(lane % 4), keep(device_calls.subgroup_id())
    blocks = max(1, min(_MOST_BLOCKS, _STAGED // tile.shape.head_dim))
    stage = shared(2 * blocks * (tile.shape.head_dim // KEYS) * 128, "uint32")
    work = _Work(tile, keys, scale, stage, *place)
    for i in range(work.steps * 8):
        put(work.sums, i, 0.0)
    for part in range(2):
        put(work.top, part, LOWEST)
        put(work.whole, part, 0.0)
    work.load_queries(words)
    count = keep(I.if_then_else(tile.exists, ceildiv(I.max(keys.end - keys.begin, 0), KEYS * blocks), 0))
    with I.serial(0, count) as block:
        token0 = keep(keys.begin + block * (KEYS * blocks))
        barrier()
        work.load_keys(token0)
        barrier()
        work.multiply_keys()
        work.weigh(token0)
        work.multiply_values()
    work.store(out, flat, lse)
