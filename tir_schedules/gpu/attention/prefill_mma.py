"""Prefill attention on matrix units: scores and weighted values as products of 16 x 16 by 16 x 8 numbers.

A subgroup has 16 rows (queries times heads of a group). Its sums stay in registers while it iterates over blocks of
keys. Weights of a block go from the layout of sums to that of factors within a lane (Dao 2023, "FlashAttention-2").
`matmul/mma.py` says which numbers of a matrix a lane has: g = lane / 4, t = lane % 4.

Which key is which row of a factor does not matter, nor which dimension is which column, if both factors agree. So a
lane loads what is adjacent and swaps halves of words:
- Of 16 keys, those with even numbers are in one product and the others in the next. Two keys are one word of a page,
  where K is transposed. Then a lane's weights are those of keys 4t, 4t + 2, 4t + 1, 4t + 3.
- Of V a lane loads `v_columns` neighbours of these four keys, for as many products.
The subgroups of a workgroup share keys: each rearranges its part of a block in shared memory for all lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr, put
from tir_schedules.gpu import device_calls
from tir_schedules.gpu.attention.pages import AttentionShape
from tir_schedules.gpu.attention.prefill_tile import PrefillTile, Tile
from tir_schedules.gpu.attention.scores import score_of, with_sink
from tir_schedules.gpu.kernel import LOWEST, barrier, ceildiv, keep, local, pin, shared
from tir_schedules.gpu.matmul.packed_loads import neighbours, put_neighbours
from tir_schedules.rule import Knobs

SUBGROUPS = 4  # of a workgroup
SUBGROUP_ROWS = 16
KEYS = 16  # of a pair of products
TILE = PrefillTile(threads=32 * SUBGROUPS, rows=SUBGROUP_ROWS * SUBGROUPS)
_STAGED_NUMBERS = 256  # head dimension times blocks of 16 keys: 16 KiB of shared memory
_MAX_BLOCKS = 4
MAX_BLOCK = KEYS * _MAX_BLOCKS  # keys between two barriers, at most; a multiple of their number
_MAX_REGISTER_STEPS = 8  # steps whose queries are in registers next to the sums; more go to shared memory
KEY_ORDER = (0, 2, 1, 3)  # a lane has the keys 4t + these


def problem(shape: AttentionShape, knobs: Knobs) -> str:
    """Why matrix units cannot process these heads, or ""."""
    if not int(knobs.get("mma", 0)) or shape.subgroup != 32:
        return "no matrix units"
    if shape.value_dim:
        return f"keys of {shape.head_dim}, values of {shape.v_dim}"
    fits = shape.row_dtype == "float16" and shape.head_dim % KEYS == 0
    return "" if fits else f"heads of {shape.head_dim} {shape.row_dtype}"


def v_columns(dim: int) -> int:
    """Neighbouring dimensions of V that a lane loads at once."""
    return next(count for count in (8, 4, 2) if dim % (8 * count) == 0)


def value_factors(words: Sequence[Expr]) -> list[Expr]:
    """The right factors of two products, from two dimensions of the lane's four keys in `KEY_ORDER`."""
    a, b, c, d = words
    low, high = device_calls.low_halves, device_calls.high_halves
    return [low(a, b), low(c, d), high(a, b), high(c, d)]


def row_reduced(value: Expr, combine: Callable[[Expr, Expr], Expr]) -> Expr:
    """A value combined over the four lanes of a row."""
    for mask in (1, 2):
        value = pin(value)
        value = combine(value, device_calls.subgroup_shuffle_xor(value, I.int32(mask)))
    return value


LoadK = Callable[[Expr, Expr, Expr, Expr], list[Expr]]
LoadV = Callable[[Expr], Callable[[Expr, int], list[Expr]]]


@dataclass(frozen=True)
class Keys:
    """What a tile attends to: tokens `begin` ... `end` - 1 of a sequence, `begin` a multiple of 16.

    `k(token0, step, g, t)` loads a lane's part of 16 keys from token0 on in 16 dimensions, the words of both products:
    the dimensions 2t, 2t + 1, 2t + 8 and 2t + 9. `v(token)(d, count)` loads `count` words of a key's values from the
    dimension d on, a multiple of 2 `count`. `seen(query, token)` is as in `prefill_plain.Keys`.
    """

    begin: Expr
    end: Expr
    k: LoadK
    v: LoadV
    seen: Callable[[Expr, Expr], Expr]


@dataclass(frozen=True)
class _Work:
    """A tile and the position of a lane in it; `stage` is shared words."""

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
        """Products over the dimensions, and pairs of products over keys."""
        return self.dim // KEYS

    @property
    def blocks(self) -> int:
        """Blocks of 16 keys between two barriers."""
        return max(1, min(_MAX_BLOCKS, _STAGED_NUMBERS // self.dim))

    @property
    def v_columns(self) -> int:
        return v_columns(self.dim)

    @cached_property
    def scores(self) -> Buffer:
        return local(self.blocks * 2 * 4)

    @cached_property
    def sums(self) -> Buffer:
        return local(self.steps * 2 * 4)

    @cached_property
    def queries(self) -> Buffer:
        """The left factors of scores, [step, 4]."""
        return local(self.steps * 4, "uint32")

    @cached_property
    def shared_queries(self) -> Buffer | None:
        """Left factors of all lanes, [subgroup, step, lane, 4], or None if registers hold them."""
        return None if self.steps <= _MAX_REGISTER_STEPS else shared(SUBGROUPS * self.steps * 128, "uint32")

    @cached_property
    def largest(self) -> Buffer:
        """The largest score of the lane's two rows."""
        return local(2)

    @cached_property
    def weight_sum(self) -> Buffer:
        """The sum of weights of the lane's keys."""
        return local(2)

    def row(self, part: int) -> Expr:
        return self.subgroup * SUBGROUP_ROWS + self.g + 8 * part

    def load_queries(self, words: Buffer, heads: int) -> None:
        """Load rows g and g + 8, of `heads` each; rows that do not exist are never stored."""
        for part in range(2):
            query = I.max(I.min(self.tile.query(self.row(part)), self.tile.queries - 1), 0)
            row = (self.tile.first + query) * heads + self.tile.head(self.row(part))
            line = keep(row * (self.dim // 2))
            for step in range(self.steps):
                for i in range(2):
                    word = words[line + step * (KEYS // 2) + self.t + 4 * i]
                    put(self.queries, step * 4 + i * 2 + part, word)
        if self.shared_queries is not None:
            for step in range(self.steps):
                put_neighbours(
                    self.shared_queries, self._own_queries(step), [self.queries[step * 4 + i] for i in range(4)]
                )

    def _own_queries(self, step: int) -> Expr:
        return ((self.subgroup * self.steps + step) * 32 + self.g * 4 + self.t) * 4

    def load_keys(self, token0: Expr) -> None:
        """Copy K and V of the next blocks to shared memory."""
        self._share(self.blocks * self.steps, lambda job: self._stage_k(token0, job // self.steps, job % self.steps))
        groups = self.dim // (8 * self.v_columns)
        self._share(self.blocks * groups, lambda job: self._stage_v(token0, job // groups, job % groups))

    def _share(self, jobs: int, body: Callable[[Expr], None]) -> None:
        for first in range(0, jobs, SUBGROUPS):
            job = keep(first + self.subgroup)
            if first + SUBGROUPS <= jobs:
                body(job)
                continue
            with I.If(job < jobs), I.Then():
                body(job)

    def _stage_k(self, token0: Expr, block: Expr, step: Expr) -> None:
        self._put(block * self.steps + step, self.keys.k(keep(token0 + block * KEYS), step, self.g, self.t))

    def _stage_v(self, token0: Expr, block: Expr, group: Expr) -> None:
        last, half = self.keys.end - 1, self.v_columns // 2
        rows = []
        for i in KEY_ORDER:
            token = keep(I.min(token0 + block * KEYS + self.t * 4 + i, last))  # memory beyond it may hold NaN
            rows.append(self.keys.v(token)(group * (16 * half) + self.g * (2 * half), half))
        for m in range(half):
            words = value_factors([row[m] for row in rows])
            self._put((self.blocks + block) * self.steps + group * half + m, words)

    def _put(self, unit: Expr, words: list[Expr]) -> None:
        put_neighbours(self.stage, keep((unit * 32 + self.g * 4 + self.t) * 4), words)

    def _staged(self, unit: int) -> list[Expr]:
        return neighbours(self.stage, (unit * 32 + self.g * 4 + self.t) * 4, 4)

    def multiply_keys(self) -> None:
        """Scores of the lane's rows and keys, not yet scaled or masked."""
        for i in range(self.blocks * 8):
            put(self.scores, i, 0.0)
        for step in range(self.steps):
            if self.shared_queries is None:
                left = [self.queries[step * 4 + i] for i in range(4)]
            else:
                left = neighbours(self.shared_queries, self._own_queries(step), 4)
            for block in range(self.blocks):
                words = self._staged(block * self.steps + step)
                for product in range(2):
                    at = (block * 2 + product) * 4
                    device_calls.mma(self.scores, at, left, words[2 * product : 2 * product + 2])

    def weigh(self, token0: Expr) -> None:
        """Scores become weights relative to the largest score so far; earlier sums are rescaled to it."""
        keys = self.keys
        for part in range(2):
            query, row_largest = keep(self.tile.query(self.row(part))), local(1)
            put(row_largest, 0, self.largest[part])
            for at, token in self._lane_keys(part, token0):
                seen = I.And(token < keys.end, keys.seen(query, token))
                score = score_of(self.tile.shape, self.scores[at], self.scale)
                put(self.scores, at, I.if_then_else(seen, score, I.float32(LOWEST)))
                put(row_largest, 0, I.max(row_largest[0], self.scores[at]))
            largest = pin(row_reduced(row_largest[0], I.max))
            rescale = pin(I.exp2(self.largest[part] - largest))
            put(self.largest, part, largest)
            put(self.weight_sum, part, self.weight_sum[part] * rescale)
            for at, _ in self._lane_keys(part, token0):
                score = self.scores[at]
                put(self.scores, at, I.if_then_else(score <= I.float32(LOWEST), I.float32(0), I.exp2(score - largest)))
                put(self.weight_sum, part, self.weight_sum[part] + self.scores[at])
            for i in range(self.steps * 2):
                for j in range(2):
                    at = i * 4 + part * 2 + j
                    put(self.sums, at, self.sums[at] * rescale)

    def _lane_keys(self, part: int, token0: Expr) -> list[tuple[int, Expr]]:
        """Index and token of each of the lane's scores of a row."""
        return [
            ((block * 2 + product) * 4 + part * 2 + i, token0 + (block * KEYS + 2 * i + product) + self.t * 4)
            for block in range(self.blocks)
            for product in range(2)
            for i in range(2)
        ]

    def multiply_values(self) -> None:
        """Add the weighted values of the staged blocks."""
        for block in range(self.blocks):
            at = block * 8
            order = (0, 2, 4, 6)  # rows g and g + 8 of one product over keys, then of the other
            left = [pin(device_calls.half_pair(self.scores[at + i], self.scores[at + i + 1])) for i in order]
            for unit in range(self.steps):
                words = self._staged((self.blocks + block) * self.steps + unit)
                for product in range(2):
                    device_calls.mma(self.sums, (unit * 2 + product) * 4, left, words[2 * product : 2 * product + 2])

    def store(self, flat: Buffer, sinks: Sequence[Buffer]) -> None:
        """Store means of the rows that exist."""
        shape = self.tile.shape
        for part in range(2):
            weight = row_reduced(self.weight_sum[part], lambda a, b: a + b)
            weight = with_sink(weight, self.largest[part], sinks, self.tile.head(self.row(part)))
            total = pin(I.max(weight, I.float32(1e-37)))
            with I.If(self.tile.inside(self.row(part))), I.Then():
                target = keep(self.tile.first + self.tile.query(self.row(part)))
                head = keep(self.tile.head(self.row(part)))
                line = (target * shape.num_heads + head) * (self.dim // 2)
                for group in range(self.dim // (8 * self.v_columns)):
                    self._store_group(flat, keep(line + group * (4 * self.v_columns)), group, part, total)

    def _store_group(self, flat: Buffer, first: Expr, group: int, part: int, total: Expr) -> None:
        """Store 2 `v_columns` neighbours: column 2t of each product, then 2t + 1."""
        values = [
            self.sums[((group * self.v_columns + j) * 4) + part * 2 + i] / total
            for i in range(2)
            for j in range(self.v_columns)
        ]
        words = [device_calls.half_pair(*values[n : n + 2]) for n in range(0, len(values), 2)]
        for n in range(0, len(words), 4):
            put_neighbours(flat, first + self.t * self.v_columns + n, words[n : n + 4])


def attend(tile: Tile, keys: Keys, q: Buffer, out: Buffer, scale: Expr, sinks: Sequence[Buffer] = ()) -> None:
    """out = weighted mean of the values that each row sees. The first heads of a row of q are queries.

    `sinks`: none, or logits f32[heads].
    """
    lane = keep(device_calls.lane())
    I.evaluate(device_calls.require_size(32))
    sizes = [x.shape[0] * (int(x.shape[1]) * tile.shape.head_dim // 2) for x in (q, out)]
    words, flat = (I.decl_buffer((size,), "uint32", data=x.data) for x, size in zip((q, out), sizes))
    position = keep(lane // 4), keep(lane % 4), keep(device_calls.subgroup_id())
    blocks = max(1, min(_MAX_BLOCKS, _STAGED_NUMBERS // tile.shape.head_dim))
    stage = shared(2 * blocks * (tile.shape.head_dim // KEYS) * 128, "uint32")
    work = _Work(tile, keys, scale, stage, *position)
    for i in range(work.steps * 8):
        put(work.sums, i, 0.0)
    for part in range(2):
        put(work.largest, part, LOWEST)
        put(work.weight_sum, part, 0.0)
    work.load_queries(words, int(q.shape[1]))
    count = keep(I.if_then_else(tile.exists, ceildiv(I.max(keys.end - keys.begin, 0), KEYS * blocks), 0))
    with I.serial(0, count) as block:
        token0 = keep(keys.begin + block * (KEYS * blocks))
        barrier()
        work.load_keys(token0)
        barrier()
        work.multiply_keys()
        work.weigh(token0)
        work.multiply_values()
    work.store(flat, sinks)
