"""A part of decode attention on matrix units: few instructions, and a page's keys and values are loaded at once.

The rows of a product's left factor are the heads that share a KV head, eight at most; its other eight rows are zero.
A subgroup takes 16 keys at a time, and the layouts are those of `prefill_mma.py`: which keys and dimensions a lane has,
and why weights need not be exchanged. Nothing is shared before the merge.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr, put
from tir_schedules.gpu import device_calls
from tir_schedules.gpu.attention import prefill_mma
from tir_schedules.gpu.attention.key_part import Finish, Part, Store
from tir_schedules.gpu.attention.pages import AttentionShape
from tir_schedules.gpu.attention.prefill_keys import PagedKeys, loads_in_products
from tir_schedules.gpu.attention.prefill_mma import KEY_ORDER, KEYS, row_reduced, v_columns, value_factors
from tir_schedules.gpu.attention.scores import score_of
from tir_schedules.gpu.kernel import LOWEST, keep, local, pin
from tir_schedules.gpu.matmul.mma import LANE_SUMS
from tir_schedules.gpu.matmul.packed_loads import put_neighbours
from tir_schedules.rule import Knobs

_MAX_DIM = 128  # whose queries and sums fit registers together with 16 keys and values; the compiler spills more


def problem(shape: AttentionShape, knobs: Knobs) -> str:
    """Why matrix units cannot process these heads, or ""."""
    return prefill_mma.problem(shape, knobs) or ("" if shape.head_dim <= _MAX_DIM else f"heads of {shape.head_dim}")


class MmaPart(Part):
    """The part on matrix units; a row of scores and sums is head g = lane / 4 of the workgroup, if it is one."""

    def __init__(self, *position: Any) -> None:
        super().__init__(*position)
        self.steps, self.columns = self.shape.head_dim // KEYS, v_columns(self.shape.head_dim)
        self.g, self.t = keep(self.lane // 4), keep(self.lane % 4)
        self.k, self.v = loads_in_products(PagedKeys(self.h, self.cached.pages, self.page, self.begin, self.end))
        self.queries = local(2 * self.steps, "uint32")
        self.scores, self.sums = local(2 * LANE_SUMS), local(2 * LANE_SUMS * self.steps)
        self.largest, self.total = local(1), local(1)

    def run(self, q: Buffer, scale: Expr, store: Store, finish: Finish) -> None:
        for i in range(2 * LANE_SUMS * self.steps):
            put(self.sums, i, 0.0)
        put(self.largest, 0, LOWEST)
        put(self.total, 0, 0.0)
        self._load_queries(q)
        self.in_blocks(KEYS, lambda token0: self._block(scale, token0))
        put(self.total, 0, row_reduced(self.total[0], lambda a, b: a + b))
        maxima, totals, sums = self.shared_sums()
        with I.If(self.g < self.heads), I.Then():
            row = keep(self.lanes.subgroup * self.heads + self.g)
            with I.If(self.t == 0), I.Then():
                put(maxima, row, self.largest[0])
                put(totals, row, self.total[0])
            self._share(sums, row)
        self.merge(maxima, totals, sums, store, finish)

    def _load_queries(self, q: Buffer) -> None:
        """The left factors of scores, two words for a step of 16 dimensions."""
        heads, words = int(q.shape[1]), self.shape.head_dim // 2
        flat = I.decl_buffer((q.shape[0] * heads * words,), "uint32", data=q.data)
        line = keep((self.b * heads + self.first + I.min(self.g, self.heads - 1)) * words + self.t)
        for i in range(2 * self.steps):
            put(self.queries, i, flat[line + i * 4])

    def _block(self, scale: Expr, token0: Expr) -> None:
        """Add the values of 16 keys, weighted; all are loaded before anything is computed."""
        keys = [self._key_factors(token0, step) for step in range(self.steps)]
        values = [self._value_factors(token0, first) for first in range(0, self.steps, self.columns // 2)]
        for i in range(2 * LANE_SUMS):
            put(self.scores, i, 0.0)
        for step, words in enumerate(keys):
            _multiply(self.scores, 0, [self.queries[2 * step + i] for i in range(2)], words)
        weights = self._weigh(scale, token0)
        for unit, words in enumerate(chain(*values)):
            _multiply(self.sums, unit * 2 * LANE_SUMS, weights, words)

    def _key_factors(self, token0: Expr, step: int) -> list[Expr]:
        return [pin(word) for word in self.k(token0, I.int32(step), self.g, self.t)]

    def _value_factors(self, token0: Expr, unit: int) -> list[list[Expr]]:
        """Right factors of the products from 2 `unit` on, for as many dimensions as a lane loads at once."""
        d, count = unit * KEYS + self.g * self.columns, self.columns // 2
        rows = [self.v(keep(I.min(token0 + self.t * 4 + i, self.end - 1)))(d, count) for i in KEY_ORDER]
        return [value_factors([row[m] for row in rows]) for m in range(count)]

    def _weigh(self, scale: Expr, token0: Expr) -> list[Expr]:
        """The weights of the lane's keys as a left factor, relative to the largest score so far."""
        largest, at = local(1), [(product * LANE_SUMS + i, 2 * i + product) for product in range(2) for i in range(2)]
        put(largest, 0, self.largest[0])
        for n, key in at:
            seen = self.is_seen(token0 + key + self.t * 4)
            score = score_of(self.shape, self.scores[n], scale)
            put(self.scores, n, I.if_then_else(seen, score, I.float32(LOWEST)))
            put(largest, 0, I.max(largest[0], self.scores[n]))
        top = pin(row_reduced(largest[0], I.max))
        rescale = pin(I.exp2(self.largest[0] - top))
        put(self.largest, 0, top)
        put(self.total, 0, self.total[0] * rescale)
        for n, _ in at:
            score = self.scores[n]
            put(self.scores, n, I.if_then_else(score <= I.float32(LOWEST), I.float32(0), I.exp2(score - top)))
            put(self.total, 0, self.total[0] + self.scores[n])
        for product in range(2 * self.steps):
            for i in range(2):
                put(self.sums, product * LANE_SUMS + i, self.sums[product * LANE_SUMS + i] * rescale)
        return [pin(device_calls.half_pair(self.scores[n], self.scores[n + 1])) for n in (0, LANE_SUMS)]

    def _share(self, sums: Buffer, row: Expr) -> None:
        """A lane's sums are columns 2t and 2t + 1 of its products, which are neighbours over `columns` products."""
        for group in range(self.shape.head_dim // (8 * self.columns)):
            first = keep(row * self.shape.head_dim + (group * 8 + 2 * self.t) * self.columns)
            products = range(group * self.columns, (group + 1) * self.columns)
            values = [self.sums[product * LANE_SUMS + i] for i in range(2) for product in products]
            for n in range(0, 2 * self.columns, 4):
                put_neighbours(sums, first + n, values[n : n + 4])


def _multiply(sums: Buffer, at: int, left: list[Expr], right: list[Expr]) -> None:
    """Add a pair of products, whose right factors are two words each; rows from the eighth on of the left one are 0."""
    words = [left[0], I.uint32(0), left[1], I.uint32(0)]
    for product in range(2):
        device_calls.mma(sums, at + product * LANE_SUMS, words, right[2 * product : 2 * product + 2])
