"""Decode attention in enough parts to fill a GPU, for any sequence length and number of KV heads.

The size of a part follows from the length, which the device knows, and not from the grid. So a sequence that grows
needs no other launch, and a launch recorded as a graph stays valid. Nor does it follow from other sequences: one gets
the same sums in any batch. Workgroups without keys do nothing. Keys that a window has passed are in no part.
(Hong et al. 2023, "FlashDecoding++", and Dao et al. 2023, "Flash-Decoding for long-context inference".)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr, add, put
from tir_schedules.gpu import device_calls
from tir_schedules.gpu.attention.decode_mma import MmaPart
from tir_schedules.gpu.attention.decode_subgroup import SubgroupPart
from tir_schedules.gpu.attention.key_part import Part, Store, heads_per_workgroup, keys_at_once
from tir_schedules.gpu.attention.pages import AttentionShape
from tir_schedules.gpu.attention.scores import with_sink
from tir_schedules.gpu.attention.step_keys import Located
from tir_schedules.gpu.kernel import LOWEST, barrier, ceildiv, ceildiv_by, keep, launch, local, pin, shared
from tir_schedules.gpu.matmul.packed_loads import lanes_of
from tir_schedules.paged import PAGE

_MAX_PARTS = 128
_MERGE_SUBGROUPS = 8  # that share the parts of a head
_FEW_HEADS = 4  # groups of heads; fewer than these have workgroups of at most `_FEW_HEADS_SUBGROUPS`
_FEW_HEADS_SUBGROUPS = 2


@dataclass(frozen=True)
class KeySplit:
    """The keys of a sequence in at most `parts`, each for a workgroup of `subgroups`, a multiple of `granule` keys."""

    shape: AttentionShape
    window: int
    parts: int
    granule: int
    subgroups: int

    @staticmethod
    def of(shape: AttentionShape, window: int, blocks: int, subgroups: int) -> KeySplit | None:
        """The split for about `blocks` workgroups a sequence; None if `blocks` is 0 or subgroups have no known size.

        A granule is what a workgroup scores at once. With few heads, workgroups of fewer subgroups make more parts of
        short contexts.
        """
        if not blocks or not shape.subgroup:
            return None
        groups = shape.num_kv_heads * (shape.group // heads_per_workgroup(shape))
        parts = min(max(2, ceildiv(blocks, groups)), _MAX_PARTS)
        if groups < _FEW_HEADS:
            subgroups = min(subgroups, _FEW_HEADS_SUBGROUPS)
        return KeySplit(shape, window, parts, subgroups * keys_at_once(shape), subgroups)

    @property
    def most(self) -> int:
        """Parts with keys, at most: `bounds` takes whole pages of what a window holds."""
        return min(self.parts, -(-(self.window + PAGE - 1) // self.granule)) if self.window else self.parts

    def bounds(self, cached: Located, b: Expr) -> tuple[Expr, Expr, Expr]:
        """Of sequence b: the first key that is seen, page-aligned; keys of a part; number of parts with keys."""
        end = cached.keys(b)
        first = keep(cached.oldest(b, b, self.window) // PAGE * PAGE) if self.window else 0
        span = keep(I.max(end - first, 0))
        size = keep(ceildiv(span, self.parts * self.granule) * self.granule)
        return first, size, keep(ceildiv_by(span, I.max(size, 1)))

    def run(self, cached: Located, index: Expr, part: Expr, body: Callable[[Part], None]) -> None:
        """body(the workgroup's part), if it has keys."""
        groups = self.shape.num_kv_heads * (self.shape.group // heads_per_workgroup(self.shape))
        first, size, used = self.bounds(cached, keep(index // groups))
        with I.If(part < used), I.Then():
            begin = keep(first + part * size)
            kind = MmaPart if self.shape.mma else SubgroupPart
            body(kind(self.shape, cached, self.window, index, begin, size, self.subgroups))

    def merge(
        self, cached: Located, first: Expr, batch: Expr, values: Buffer, sums: Buffer, sinks: Sequence[Buffer],
        store: Store,
    ) -> None:  # fmt: skip
        """Merge the parts of all heads; `store` as in `Part.run`.

        `values` [part, row, D] has the sums of weighted values, and `sums` [part, row, 2] the largest score and the sum
        of weights; a row is (b - first, head), of `batch` queries b from `first` on; `sinks`: none, or logits [heads].
        """
        heads, dim, size = self.shape.num_heads, self.shape.v_dim, self.shape.subgroup
        with launch(_MERGE_SUBGROUPS * size, batch * heads) as (row, _, tx):
            lanes = lanes_of(size)
            lane, subgroup = keep(tx % size), lanes.subgroup
            b, head = keep(first + row // heads), keep(row % heads)
            used = self.bounds(cached, b)[2]
            largest, weight_sum = self._totals(sums, lambda part: keep((part * batch * heads + row) * 2), used, lane)
            weight_sum = with_sink(weight_sum, largest, sinks, head)
            columns = -(-dim // size)
            total = local(columns)
            for c in range(columns):
                put(total, c, 0.0)
            with I.serial(0, ceildiv(used - subgroup, _MERGE_SUBGROUPS)) as i:
                at = keep((i * _MERGE_SUBGROUPS + subgroup) * batch * heads + row)
                share = pin(I.exp2(sums[at * 2] - largest))
                for c in range(columns):
                    d = lane + c * size if dim % size == 0 else I.min(lane + c * size, dim - 1)
                    add(total, c, values[at * dim + d] * share)
            partial = shared(_MERGE_SUBGROUPS * dim)
            for c in range(columns):
                with I.If(lane + c * size < dim), I.Then():
                    put(partial, subgroup * dim + lane + c * size, total[c])
            barrier()
            with I.serial(0, ceildiv(dim, _MERGE_SUBGROUPS * size)) as i:
                d = keep(i * (_MERGE_SUBGROUPS * size) + tx)
                with I.If(d < dim), I.Then():
                    put(total, 0, partial[d])
                    for other in range(1, _MERGE_SUBGROUPS):
                        add(total, 0, partial[other * dim + d])
                    store(b, head, d, total[0], weight_sum)

    def _totals(self, sums: Buffer, at: Callable[[Expr], Expr], used: Expr, lane: Expr) -> tuple[Expr, Expr]:
        """The largest score of the parts and the sum of weights, computed by each subgroup; a lane has parts."""
        size, lane_largest, total = self.shape.subgroup, local(1), local(1)
        per_lane = -(-self.most // size)
        maxima, weight_sums = local(per_lane), local(per_lane)
        put(lane_largest, 0, LOWEST)
        for i in range(per_lane):
            part = keep(i * size + lane)
            put(maxima, i, LOWEST)
            put(weight_sums, i, 0.0)
            with I.If(part < used), I.Then():
                put(maxima, i, sums[at(part)])
                put(weight_sums, i, sums[at(part) + 1])
            put(lane_largest, 0, I.max(lane_largest[0], maxima[i]))
        largest = pin(device_calls.subgroup_max(lane_largest[0]))
        put(total, 0, 0.0)
        for i in range(per_lane):
            add(total, 0, weight_sums[i] * I.exp2(maxima[i] - largest))
        return largest, pin(device_calls.subgroup_add(total[0]))
