"""A part of decode attention where the size of a subgroup is known: scores, weights and values in registers.

A lane has keys: K lies transposed in a page, so that neighbouring lanes read neighbouring keys; and dimensions of V.
Subgroups of a workgroup take blocks of keys in turns and add up what they have at the end.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm.script.ir_builder import tirx as I

from tir_schedules.gpu import device_calls
from tir_schedules.gpu.kernel import LOWEST, Buffer, Expr, add, barrier, ceildiv, f32, keep, local, pin, put, shared
from tir_schedules.gpu.kv_pages import AttentionShape
from tir_schedules.gpu.octets import OCTET, Xs, lanes_of
from tir_schedules.gpu.scores import Cached, score_of
from tir_schedules.paged import PAGE

_HEADS = 8  # of a group that one workgroup takes at most: their sums are registers
_BLOCK = 32  # keys that a subgroup scores at once, at least
_UNROLLED = 4  # keys whose values are loaded at once

Store = Callable[[Expr, Expr, Expr, Expr, Expr], None]
Finish = Callable[[Expr, Expr, Expr, Expr], None]


def heads_of(shape: AttentionShape) -> int:
    """Query heads of a workgroup, a divisor of the group."""
    return next(n for n in range(min(_HEADS, shape.group), 0, -1) if shape.group % n == 0)


def keys_at_once(shape: AttentionShape) -> int:
    """Keys that a subgroup scores at once."""
    return shape.subgroup * max(1, _BLOCK // shape.subgroup)


class SubgroupPart:
    """Keys begin ... begin + part - 1 of a sequence, for some query heads of one KV head."""

    def __init__(
        self, shape: AttentionShape, cached: Cached, window: int, index: Expr, begin: Expr, part: Expr, subgroups: int
    ) -> None:
        self.shape, self.cached, self.subgroups = shape, cached, subgroups
        self.lanes = lanes_of(shape.subgroup)
        self.lane = keep(self.lanes.octet * OCTET + self.lanes.lane)
        self.heads = heads_of(shape)
        chunks = shape.group // self.heads
        sequence = keep(index // (shape.num_kv_heads * chunks))
        self.b, self.h = sequence, keep(index // chunks % shape.num_kv_heads)
        self.first = keep(self.h * shape.group + index % chunks * self.heads)
        self.begin = begin
        self.end = keep(I.min(cached.keys(self.b), begin + part))
        self.oldest = cached.oldest(self.b, self.b, window) if window else None
        self.each = keys_at_once(shape) // shape.subgroup  # keys of a lane
        self.columns = -(-shape.head_dim // shape.subgroup)  # dimensions of a lane
        self.top, self.total = local(self.heads), local(self.heads)
        self.sums = local(self.heads * self.columns)
        self.weights = [local(self.heads) for _ in range(self.each)]

    def run(self, q: Buffer, scale: Expr, store: Store, finish: Finish) -> None:
        """store(b, head, d, sum of weighted values, sum of weights), finish(b, head, largest score, sum of weights)."""
        for g in range(self.heads):
            put(self.top, g, LOWEST)
            put(self.total, g, 0.0)
        for i in range(self.heads * self.columns):
            put(self.sums, i, 0.0)
        size = self.shape.subgroup * self.each
        blocks = keep(ceildiv(I.max(self.end - self.begin, 0), size))
        if self.subgroups == 1:
            with I.serial(0, blocks) as i:
                self._block(q, scale, keep(self.begin + i * size))
        else:
            with I.serial(0, ceildiv(blocks, self.subgroups)) as i:
                self._block(q, scale, keep(self.begin + (i * self.subgroups + self.lanes.subgroup) * size))
        for g in range(self.heads):
            put(self.total, g, self._reduced(device_calls.subgroup_add, self.total[g]))
        if self.subgroups == 1:
            self._finish(store, finish)
        else:
            self._merge(store, finish)

    def _reduced(self, reduce: Callable[[Expr, int], Expr], value: Expr) -> Expr:
        """Software adapters reduce octets by shuffles faster than lane by lane."""
        return reduce(value, OCTET if self.shape.subgroup == OCTET else 0)

    def _block(self, q: Buffer, scale: Expr, token0: Expr) -> None:
        tokens = [keep(token0 + self.lane * self.each + i) for i in range(self.each)]
        last = I.max(self.end - 1, 0)
        pages = self.cached.pages
        places = [
            (keep(self.cached.page(self.b, I.min(token, last) // PAGE)), keep(I.min(token, last) % PAGE))
            for token in tokens
        ]
        dots = self._dots(q, [pin(pages.k(page, self.h, slot, 0)) for page, slot in places])
        for g in range(self.heads):
            self._weigh(g, [self._score(tokens[i], dots[i * self.heads + g], scale) for i in range(self.each)])
        self._values(token0, [pin(pages.v(page, self.h, slot, 0)) for page, slot in places])

    def _dots(self, q: Buffer, keys: list[Expr]) -> Buffer:
        """q . k of the lane's keys and all heads, [key, head]."""
        shape = self.shape
        dots = local(self.each * self.heads)
        for i in range(self.each * self.heads):
            put(dots, i, 0.0)
        flat = I.decl_buffer((q.shape[0] * shape.num_heads * shape.head_dim,), shape.dtype, data=q.data)
        row = self.b * shape.num_heads + self.first
        lines = [pin((row + g) * shape.head_dim) for g in range(self.heads)]
        qs = Xs(flat, lines, self.lanes, shape.shuffled)
        with I.serial(0, shape.head_dim // OCTET) as step:
            rows = qs.step(step)
            for j in range(OCTET):
                ks = [pin(f32(self.cached.pages.data[key + (step * OCTET + j) * PAGE])) for key in keys]
                for g, row_ in enumerate(rows):
                    value = qs.column(row_, j)
                    for i, k in enumerate(ks):
                        add(dots, i * self.heads + g, value * k)
        return dots

    def _score(self, token: Expr, dot: Expr, scale: Expr) -> Expr:
        seen = token < self.end
        if self.oldest is not None:
            seen = I.And(seen, token >= self.oldest)
        return pin(I.if_then_else(seen, score_of(self.shape, dot, scale), I.float32(LOWEST)))

    def _weigh(self, g: int, scores: list[Expr]) -> None:
        """Weights of a block for a head, relative to the largest score so far; what there was shrinks with it."""
        best = scores[0]
        for score in scores[1:]:
            best = I.max(best, score)
        top = pin(I.max(self.top[g], self._reduced(device_calls.subgroup_max, pin(best))))
        shrink = pin(I.exp2(self.top[g] - top))
        total = self.total[g] * shrink
        for i, score in enumerate(scores):
            put(self.weights[i], g, I.if_then_else(score > I.float32(LOWEST), I.exp2(score - top), I.float32(0)))
            total = total + self.weights[i][g]
        put(self.total, g, total)
        put(self.top, g, top)
        for c in range(self.columns):
            put(self.sums, g * self.columns + c, self.sums[g * self.columns + c] * shrink)

    def _values(self, token0: Expr, places: list[Expr]) -> None:
        """Adds weighted values: of one lane's keys, then of the next's."""
        unrolled = max(1, _UNROLLED // self.each)
        used = I.max(I.min(self.end - token0, self.shape.subgroup * self.each), 0)
        with I.serial(0, ceildiv(ceildiv(used, self.each), unrolled)) as turn:
            for u in range(unrolled):
                lane = keep(turn * unrolled + u)
                for i in range(self.each):
                    base = pin(device_calls.subgroup_shuffle(places[i], lane))
                    weights = [pin(device_calls.subgroup_shuffle(self.weights[i][g], lane)) for g in range(self.heads)]
                    for c in range(self.columns):
                        value = pin(f32(self.cached.pages.data[base + self._dimension(c)]))
                        for g, weight in enumerate(weights):
                            add(self.sums, g * self.columns + c, weight * value)

    def _dimension(self, c: int) -> Expr:
        """The c-th dimension of this lane; the last one where there are not so many."""
        d = self.lane + c * self.shape.subgroup
        return d if self.shape.head_dim % self.shape.subgroup == 0 else I.min(d, self.shape.head_dim - 1)

    def _finish(self, store: Store, finish: Finish) -> None:
        for g in range(self.heads):
            for c in range(self.columns):
                d = self.lane + c * self.shape.subgroup
                value = self.sums[g * self.columns + c]
                if self.shape.head_dim % self.shape.subgroup == 0:
                    store(self.b, self.first + g, d, value, self.total[g])
                    continue
                with I.If(d < self.shape.head_dim), I.Then():
                    store(self.b, self.first + g, d, value, self.total[g])
        with I.If(self.lane == 0), I.Then():
            for g in range(self.heads):
                finish(self.b, self.first + g, self.top[g], self.total[g])

    def _merge(self, store: Store, finish: Finish) -> None:
        """What the subgroups have, relative to the largest score of all."""
        heads, dim, count = self.heads, self.shape.head_dim, self.subgroups
        tops, totals, sums = shared(count * heads), shared(count * heads), shared(count * heads * dim)
        here = self.lanes.subgroup * heads
        for g in range(heads):
            with I.If(self.lane == 0), I.Then():
                put(tops, here + g, self.top[g])
                put(totals, here + g, self.total[g])
            for c in range(self.columns):
                d = self.lane + c * self.shape.subgroup
                with I.If(d < dim), I.Then():
                    put(sums, (here + g) * dim + d, self.sums[g * self.columns + c])
        barrier()
        top, total, whole = local(1), local(1), local(1)
        threads = count * self.shape.subgroup
        thread = keep(self.lanes.subgroup * self.shape.subgroup + self.lane)
        with I.serial(0, ceildiv(heads * dim, threads)) as i:
            item = keep(i * threads + thread)
            with I.If(item < heads * dim), I.Then():
                g, d = keep(item // dim), keep(item % dim)
                put(top, 0, LOWEST)
                for other in range(count):
                    put(top, 0, I.max(top[0], tops[other * heads + g]))
                put(total, 0, 0.0)
                put(whole, 0, 0.0)
                for other in range(count):
                    share = pin(I.exp2(tops[other * heads + g] - top[0]))
                    add(whole, 0, totals[other * heads + g] * share)
                    add(total, 0, sums[(other * heads + g) * dim + d] * share)
                store(self.b, self.first + g, d, total[0], whole[0])
                with I.If(d == 0), I.Then():
                    finish(self.b, self.first + g, top[0], whole[0])
