"""A part of decode attention on subgroups of a known size: which keys and heads it has, and how its sums are merged."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr, add, put
from tir_schedules.gpu.attention.pages import AttentionShape
from tir_schedules.gpu.attention.step_keys import Located
from tir_schedules.gpu.kernel import LOWEST, barrier, ceildiv, keep, local, pin, shared
from tir_schedules.gpu.matmul.packed_loads import GROUP_LANES, lanes_of
from tir_schedules.paged import PAGE

_MAX_HEADS = 8  # of a workgroup: their sums are in registers
_MIN_BLOCK_KEYS = 32  # that a subgroup scores at once

Store = Callable[[Expr, Expr, Expr, Expr, Expr], None]
Finish = Callable[[Expr, Expr, Expr, Expr], None]


def heads_per_workgroup(shape: AttentionShape) -> int:
    """Query heads of a workgroup, a divisor of the group."""
    return next(n for n in range(min(_MAX_HEADS, shape.group), 0, -1) if shape.group % n == 0)


def keys_at_once(shape: AttentionShape) -> int:
    """Keys that a subgroup scores at once: on matrix units a page of them."""
    return PAGE if shape.mma else shape.subgroup * max(1, _MIN_BLOCK_KEYS // shape.subgroup)


class Part(ABC):
    """Keys begin ... begin + part - 1 of a sequence, for query heads of one KV head.

    `index` is that of (sequence, KV head, chunk of its query heads).
    """

    def __init__(
        self, shape: AttentionShape, cached: Located, window: int, index: Expr, begin: Expr, part: Expr, subgroups: int
    ) -> None:
        self.shape, self.cached, self.subgroups = shape, cached, subgroups
        self.lanes = lanes_of(shape.subgroup)
        self.lane = keep(self.lanes.group * GROUP_LANES + self.lanes.lane)
        self.heads = heads_per_workgroup(shape)
        chunks = shape.group // self.heads
        sequence = keep(index // (shape.num_kv_heads * chunks))
        self.b, self.h = sequence, keep(index // chunks % shape.num_kv_heads)
        self.first = keep(self.h * shape.group + index % chunks * self.heads)
        self.page = cached.table(self.b)
        self.begin = begin
        self.end = keep(I.min(cached.keys(self.b), begin + part))
        self.oldest = cached.oldest(self.b, self.b, window) if window else None

    @abstractmethod
    def run(self, q: Buffer, scale: Expr, store: Store, finish: Finish) -> None:
        """store(b, head, d, sum of weighted values, sum of weights), finish(b, head, largest score, sum of weights)."""

    def in_blocks(self, size: int, body: Callable[[Expr], None]) -> None:
        """body(first token) for the blocks of `size` keys that this subgroup has."""
        blocks = keep(ceildiv(I.max(self.end - self.begin, 0), size))
        if self.subgroups == 1:
            with I.serial(0, blocks) as i:
                body(keep(self.begin + i * size))
        else:
            with I.serial(0, ceildiv(blocks, self.subgroups)) as i:
                body(keep(self.begin + (i * self.subgroups + self.lanes.subgroup) * size))

    def is_seen(self, token: Expr) -> Expr:
        """Whether a token has a key in this part that the window shows."""
        seen = token < self.end
        return seen if self.oldest is None else I.And(seen, token >= self.oldest)

    def shared_sums(self) -> tuple[Buffer, Buffer, Buffer]:
        """Largest scores and sums of weights, [subgroup, head], and sums of weighted values, [subgroup, head, D]."""
        count = self.subgroups * self.heads
        return shared(count), shared(count), shared(count * self.shape.v_dim)

    def merge(self, maxima: Buffer, totals: Buffer, sums: Buffer, store: Store, finish: Finish) -> None:
        """Merge the subgroups' `shared_sums`, relative to the largest score of all."""
        heads, dim, count = self.heads, self.shape.v_dim, self.subgroups
        barrier()
        largest, total, weight_sum = local(1), local(1), local(1)
        threads = count * self.shape.subgroup
        thread = keep(self.lanes.subgroup * self.shape.subgroup + self.lane)
        with I.serial(0, ceildiv(heads * dim, threads)) as i:
            item = keep(i * threads + thread)
            with I.If(item < heads * dim), I.Then():
                g, d = keep(item // dim), keep(item % dim)
                put(largest, 0, LOWEST)
                for other in range(count):
                    put(largest, 0, I.max(largest[0], maxima[other * heads + g]))
                put(total, 0, 0.0)
                put(weight_sum, 0, 0.0)
                for other in range(count):
                    share = pin(I.exp2(maxima[other * heads + g] - largest[0]))
                    add(weight_sum, 0, totals[other * heads + g] * share)
                    add(total, 0, sums[(other * heads + g) * dim + d] * share)
                store(self.b, self.first + g, d, total[0], weight_sum[0])
                with I.If(d == 0), I.Then():
                    finish(self.b, self.first + g, largest[0], weight_sum[0])
