"""Decode attention in as many parts as fill a GPU, whatever the length of a sequence and the number of KV heads.

The size of a part follows from the length, which the device knows, not from the grid: so a sequence that grows needs
no other launch, and one recorded as a graph stays good. A part is a multiple of the keys that the subgroups of a
workgroup score at once; workgroups that are left without keys do nothing. Keys that a window has passed are in none.
(Hong et al. 2023, "FlashDecoding++", and Dao et al. 2023, "Flash-Decoding for long-context inference".)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm.script.ir_builder import tirx as I

from tir_schedules.gpu import device_calls
from tir_schedules.gpu.kernel import LOWEST, Buffer, Expr, add, barrier, ceildiv, keep, launch, local, pin, put, shared
from tir_schedules.gpu.kv_pages import AttentionShape
from tir_schedules.gpu.octets import lanes_of
from tir_schedules.gpu.scores import Cached
from tir_schedules.gpu.subgroup_attention import Finish, Store, SubgroupPart, heads_of, keys_at_once
from tir_schedules.paged import PAGE

_MOST_PARTS = 128
_MERGING = 8  # subgroups that share the parts of a head
_FEW, _OF_FEW = 4, 2


@dataclass(frozen=True)
class KeySplit:
    """The keys of a sequence in `parts`, each for a workgroup of `subgroups`."""

    shape: AttentionShape
    window: int
    parts: int
    subgroups: int

    @staticmethod
    def of(shape: AttentionShape, window: int, blocks: int, subgroups: int) -> KeySplit | None:
        """For about `blocks` workgroups a sequence; None without a number of them, or without subgroups.

        Where there are few heads, workgroups of fewer subgroups make more parts of short contexts.
        """
        if not blocks or not shape.subgroup:
            return None
        groups = shape.num_kv_heads * (shape.group // heads_of(shape))
        parts = min(max(2, ceildiv(blocks, groups)), _MOST_PARTS)
        return KeySplit(shape, window, parts, min(subgroups, _OF_FEW) if groups < _FEW else subgroups)

    @property
    def granule(self) -> int:
        """Keys that a workgroup scores at once."""
        return self.subgroups * keys_at_once(self.shape)

    def used(self, keys: int) -> int:
        """Parts that so many keys are in."""
        size = -(-keys // (self.parts * self.granule)) * self.granule
        return -(-keys // size)

    def _bounds(self, cached: Cached, b: Expr) -> tuple[Expr, Expr, Expr]:
        """Of sequence b the first key that is seen, or one before it, the keys of a part, and how many have some."""
        end = cached.keys(b)
        first = keep(cached.oldest(b, b, self.window) // PAGE * PAGE) if self.window else 0
        span = keep(I.max(end - first, 0))
        size = keep(ceildiv(span, self.parts * self.granule) * self.granule)
        return first, size, keep(ceildiv_by(span, I.max(size, 1)))

    def run(self, cached: Cached, index: Expr, part: Expr, body: Callable[[SubgroupPart], None]) -> None:
        """body(the part of a workgroup), if it has keys."""
        groups = self.shape.num_kv_heads * (self.shape.group // heads_of(self.shape))
        first, size, used = self._bounds(cached, keep(index // groups))
        with I.If(part < used), I.Then():
            begin = keep(first + part * size)
            body(SubgroupPart(self.shape, cached, self.window, index, begin, size, self.subgroups))

    def merge(
        self, cached: Cached, batch: Expr, values: Buffer, sums: Buffer, store: Store, finish: Finish
    ) -> None:
        """store and finish, as `SubgroupPart.run` has them, of all heads.

        `values` [part, row, D], `sums` [part, row, 2], a row being (b, head): of each part its sums of weighted values,
        the largest score and the sum of weights.
        """
        heads, dim, size = self.shape.num_heads, self.shape.head_dim, self.shape.subgroup
        with launch(_MERGING * size, batch * heads) as (row, _, tx):
            lanes = lanes_of(size)
            lane, subgroup = keep(tx % size), lanes.subgroup
            b, head = keep(row // heads), keep(row % heads)
            used = self._bounds(cached, b)[2]
            top, whole = self._totals(sums, lambda part: keep((part * batch * heads + row) * 2), used, lane)
            columns = -(-dim // size)
            total = local(columns)
            for c in range(columns):
                put(total, c, 0.0)
            with I.serial(0, ceildiv(used - subgroup, _MERGING)) as i:
                at = keep((i * _MERGING + subgroup) * batch * heads + row)
                share = pin(I.exp2(sums[at * 2] - top))
                for c in range(columns):
                    d = lane + c * size if dim % size == 0 else I.min(lane + c * size, dim - 1)
                    add(total, c, values[at * dim + d] * share)
            mine = shared(_MERGING * dim)
            for c in range(columns):
                with I.If(lane + c * size < dim), I.Then():
                    put(mine, subgroup * dim + lane + c * size, total[c])
            barrier()
            with I.serial(0, ceildiv(dim, _MERGING * size)) as i:
                d = keep(i * (_MERGING * size) + tx)
                with I.If(d < dim), I.Then():
                    put(total, 0, mine[d])
                    for other in range(1, _MERGING):
                        add(total, 0, mine[other * dim + d])
                    store(b, head, d, total[0], whole)
            with I.If(tx == 0), I.Then():
                finish(b, head, top, whole)

    def _totals(self, sums: Buffer, at: Callable[[Expr], Expr], used: Expr, lane: Expr) -> tuple[Expr, Expr]:
        """The largest score of the parts and the sum of weights, the same in each subgroup: a lane has parts."""
        size, best, total = self.shape.subgroup, local(1), local(1)
        turns = -(-self.parts // size)
        tops, wholes = local(turns), local(turns)
        put(best, 0, LOWEST)
        for i in range(turns):
            part = keep(i * size + lane)
            put(tops, i, LOWEST)
            put(wholes, i, 0.0)
            with I.If(part < used), I.Then():
                put(tops, i, sums[at(part)])
                put(wholes, i, sums[at(part) + 1])
            put(best, 0, I.max(best[0], tops[i]))
        top = pin(device_calls.subgroup_max(best[0]))
        put(total, 0, 0.0)
        for i in range(turns):
            add(total, 0, wholes[i] * I.exp2(tops[i] - top))
        return top, pin(device_calls.subgroup_add(total[0]))


def ceildiv_by(a: Expr, b: Expr) -> Expr:
    """a / b, rounded up, of numbers that the device knows; a >= 0, b > 0."""
    return I.truncdiv(a + (b - 1), b)
