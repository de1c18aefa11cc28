"""A part of decode attention on subgroups of a known size: scores, weights and values stay in registers.

A lane has keys: K is transposed in a page, so neighbouring lanes read neighbouring keys. Then it has dimensions of V.
Subgroups of a workgroup take interleaved blocks of keys and merge their sums at the end.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr, add, put
from tir_schedules.gpu import device_calls
from tir_schedules.gpu.attention.key_part import Finish, Part, Store, keys_at_once
from tir_schedules.gpu.attention.pages import Row
from tir_schedules.gpu.attention.scores import score_of
from tir_schedules.gpu.kernel import LOWEST, ceildiv, keep, local, pin
from tir_schedules.gpu.matmul.packed_loads import GROUP_LANES, Xs
from tir_schedules.paged import PAGE

_UNROLLED_KEYS = 8  # whose values are loaded at once
_STEPS_AT_ONCE = (4, 2, 1)  # of eight dimensions of a key, the first that divides them


class SubgroupPart(Part):
    """The part in registers: a lane has keys, then dimensions."""

    def __init__(self, *position: Any) -> None:
        super().__init__(*position)
        shape = self.shape
        self.keys_per_lane = keys_at_once(shape) // shape.subgroup
        self.dims_per_lane = -(-shape.v_dim // shape.subgroup)
        self.largest, self.total = local(self.heads), local(self.heads)
        self.sums = local(self.heads * self.dims_per_lane)
        self.weights = [local(self.heads) for _ in range(self.keys_per_lane)]

    def run(self, q: Buffer, scale: Expr, store: Store, finish: Finish) -> None:
        for g in range(self.heads):
            put(self.largest, g, LOWEST)
            put(self.total, g, 0.0)
        for i in range(self.heads * self.dims_per_lane):
            put(self.sums, i, 0.0)
        self.in_blocks(self.shape.subgroup * self.keys_per_lane, lambda token0: self._block(q, scale, token0))
        for g in range(self.heads):
            put(self.total, g, self._reduced(device_calls.subgroup_add, self.total[g]))
        if self.subgroups == 1:
            self._finish(store, finish)
        else:
            self._merge(store, finish)

    def _reduced(self, reduce: Callable[[Expr, int], Expr], value: Expr) -> Expr:
        """Software adapters reduce subgroups of 8 lanes faster by shuffles than lane by lane."""
        return reduce(value, GROUP_LANES if self.shape.subgroup == GROUP_LANES else 0)

    def _block(self, q: Buffer, scale: Expr, token0: Expr) -> None:
        tokens = [keep(token0 + self.lane * self.keys_per_lane + i) for i in range(self.keys_per_lane)]
        last = I.max(self.end - 1, 0)
        pages = self.cached.pages
        positions = [(keep(self.page(I.min(token, last) // PAGE)), keep(I.min(token, last) % PAGE)) for token in tokens]
        dots = self._dots(q, [pages.key(page, self.h, slot) for page, slot in positions])
        for g in range(self.heads):
            self._weigh(g, [self._score(tokens[i], dots[i * self.heads + g], scale) for i in range(self.keys_per_lane)])
        self._values(token0, [pages.value(page, self.h, slot) for page, slot in positions])

    def _dots(self, q: Buffer, keys: list[Row]) -> Buffer:
        """q . k of the lane's keys and all heads, [key, head]."""
        shape = self.shape
        dots = local(self.keys_per_lane * self.heads)
        for i in range(self.keys_per_lane * self.heads):
            put(dots, i, 0.0)
        heads = int(q.shape[1])  # keys and values may follow in a row
        flat = I.decl_buffer((q.shape[0] * heads * shape.head_dim,), shape.row_dtype, data=q.data)
        row = self.b * heads + self.first
        # `keep`, not `pin`: TVM has to see that queries can be loaded in vectors.
        query_starts = [keep((row + g) * shape.head_dim) for g in range(self.heads)]
        qs = Xs(flat, query_starts, self.lanes, shape.shuffled)

        def load(step: Expr) -> tuple[list[list[Expr]], list[list[Expr]]]:
            scales = [pin(key.scale(step * GROUP_LANES)) if shape.scale_groups else 1 for key in keys]
            columns = [
                [pin(key.number(step * GROUP_LANES + j, scale)) for key, scale in zip(keys, scales)]
                for j in range(GROUP_LANES)
            ]
            return qs.step(step), columns

        steps = shape.head_dim // GROUP_LANES
        at_once = 1 if shape.shuffled else next(n for n in _STEPS_AT_ONCE if steps % n == 0)
        with I.serial(0, steps // at_once) as i:
            for rows, columns in [load(keep(i * at_once + n)) for n in range(at_once)]:
                for j, ks in enumerate(columns):
                    for g, row_ in enumerate(rows):
                        value = qs.column(row_, j)
                        for key, k in enumerate(ks):
                            add(dots, key * self.heads + g, value * k)
        return dots

    def _score(self, token: Expr, dot: Expr, scale: Expr) -> Expr:
        seen = self.is_seen(token)
        return pin(I.if_then_else(seen, score_of(self.shape, dot, scale), I.float32(LOWEST)))

    def _weigh(self, g: int, scores: list[Expr]) -> None:
        """Weights of a block for a head, relative to the largest score so far; earlier sums are rescaled to it."""
        block_largest = scores[0]
        for score in scores[1:]:
            block_largest = I.max(block_largest, score)
        largest = pin(I.max(self.largest[g], self._reduced(device_calls.subgroup_max, pin(block_largest))))
        rescale = pin(I.exp2(self.largest[g] - largest))
        total = self.total[g] * rescale
        for i, score in enumerate(scores):
            put(self.weights[i], g, I.if_then_else(score <= I.float32(LOWEST), I.float32(0), I.exp2(score - largest)))
            total = total + self.weights[i][g]
        put(self.total, g, total)
        put(self.largest, g, largest)
        for c in range(self.dims_per_lane):
            put(self.sums, g * self.dims_per_lane + c, self.sums[g * self.dims_per_lane + c] * rescale)

    def _values(self, token0: Expr, rows: list[Row]) -> None:
        """Add the weighted values of a block, one lane's keys after another's."""
        unrolled = max(1, _UNROLLED_KEYS // self.keys_per_lane // (2 if self.shape.shuffled else 1))
        used = I.max(I.min(self.end - token0, self.shape.subgroup * self.keys_per_lane), 0)
        with I.serial(0, ceildiv(ceildiv(used, self.keys_per_lane), unrolled)) as step:
            for u in range(unrolled):
                lane = keep(step * unrolled + u)
                for i in range(self.keys_per_lane):
                    row = rows[i].moved(functools.partial(device_calls.subgroup_shuffle, lane=lane))
                    weights = [pin(device_calls.subgroup_shuffle(self.weights[i][g], lane)) for g in range(self.heads)]
                    for c in range(self.dims_per_lane):
                        value = pin(row.at(self._dimension(c)))
                        for g, weight in enumerate(weights):
                            add(self.sums, g * self.dims_per_lane + c, weight * value)

    def _dimension(self, c: int) -> Expr:
        """The c-th dimension of this lane, at most the last one."""
        d = self.lane + c * self.shape.subgroup
        return d if self.shape.v_dim % self.shape.subgroup == 0 else I.min(d, self.shape.v_dim - 1)

    def _finish(self, store: Store, finish: Finish) -> None:
        for g in range(self.heads):
            for c in range(self.dims_per_lane):
                d = self.lane + c * self.shape.subgroup
                value = self.sums[g * self.dims_per_lane + c]
                if self.shape.v_dim % self.shape.subgroup == 0:
                    store(self.b, self.first + g, d, value, self.total[g])
                    continue
                with I.If(d < self.shape.v_dim), I.Then():
                    store(self.b, self.first + g, d, value, self.total[g])
        with I.If(self.lane == 0), I.Then():
            for g in range(self.heads):
                finish(self.b, self.first + g, self.largest[g], self.total[g])

    def _merge(self, store: Store, finish: Finish) -> None:
        """Merge the subgroups' sums, relative to the largest score of all, through shared memory."""
        heads, dim = self.heads, self.shape.v_dim
        maxima, totals, sums = self.shared_sums()
        first = self.lanes.subgroup * heads
        for g in range(heads):
            with I.If(self.lane == 0), I.Then():
                put(maxima, first + g, self.largest[g])
                put(totals, first + g, self.total[g])
            for c in range(self.dims_per_lane):
                d = self.lane + c * self.shape.subgroup
                with I.If(d < dim), I.Then():
                    put(sums, (first + g) * dim + d, self.sums[g * self.dims_per_lane + c])
        self.merge(maxima, totals, sums, store, finish)
