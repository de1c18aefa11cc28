"""Paged attention of one query per sequence (decode).

A workgroup has a part of the keys of one KV head, and all query heads that share it. A second kernel merges the parts
(Dao et al. 2023, "Flash-Decoding for long-context inference"). Without subgroups a part is `DecodePart`; with them it
is `SubgroupPart`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr, add, function, put
from tir_schedules.gpu.attention.decode_part import SHARED_BYTES, DecodePart, DecodeTile
from tir_schedules.gpu.attention.decode_subgroup import SubgroupPart
from tir_schedules.gpu.attention.key_part import Store, heads_per_workgroup
from tir_schedules.gpu.attention.pages import AttentionShape, cache_heads_argument, flat_pages
from tir_schedules.gpu.attention.scores import Cached, cached_arguments, results, store_sum, with_sink
from tir_schedules.gpu.kernel import LOWEST, ceildiv, keep, launch, local, workspace
from tir_schedules.paged import PAGE


@dataclass(frozen=True)
class _Results:
    """Stores results of all keys: weighted means, and log2 of the sum of 2**score."""

    shape: AttentionShape
    out: Buffer
    lse: Buffer

    def store_lse(self, b: Expr, head: Expr, largest: Expr, total: Expr) -> None:
        store_sum(self.shape, self.out, self.lse, b, head, largest + I.log2(_nonzero(total)))

    def store_mean(self, b: Expr, head: Expr, d: Expr, sum_: Expr, total: Expr) -> None:
        store_mean(self.out)(b, head, d, sum_, total)


@dataclass(frozen=True)
class PartResults:
    """Stores results of one part for the merge: weighted sums, and pairs of largest score and sum of weights."""

    shape: AttentionShape
    batch: Expr
    part: Expr
    values: Buffer
    sums: Buffer
    first: Expr = 0  # of the rows that there are results of

    def store_sums(self, b: Expr, head: Expr, largest: Expr, total: Expr) -> None:
        put(self.sums, self._row(b, head) * 2, largest)
        put(self.sums, self._row(b, head) * 2 + 1, total)

    def store_values(self, b: Expr, head: Expr, d: Expr, sum_: Expr, total: Expr) -> None:
        put(self.values, self.value_at(b, head, d), sum_)

    def value_at(self, b: Expr, head: Expr, d: Expr) -> Expr:
        """The index of an element of `values`."""
        return self._row(b, head) * self.shape.v_dim + d

    def _row(self, b: Expr, head: Expr) -> Expr:
        return (self.part * self.batch + b - self.first) * self.shape.num_heads + head


def store_mean(out: Buffer) -> Store:
    """Stores means of all keys in out [row, head, D]."""
    return lambda b, head, d, sum_, total: put(out, (b, head, d), sum_ / _nonzero(total))


def _nonzero(total: Expr) -> Expr:
    return I.max(total, I.float32(1e-37))


def decode(shape: AttentionShape, window: int, sliding_info: bool, tile: DecodeTile = DecodeTile()) -> tirx.PrimFunc:
    """One query per sequence against its pages: q and output [B, heads, D], lse f32[B, heads] in base 2."""
    batch = tirx.Var("batch", "int32")
    arguments = {
        "q": cache_heads_argument(shape, batch),
        **cached_arguments(shape, batch, batch, sliding_info),
        **results(shape, batch),
    }

    def body(q: Buffer, paged: Buffer, indptr: Buffer, indices: Buffer, *rest: Buffer) -> None:
        length, k_position, q_position, out, lse = rest[:5]
        scale = rest[-1]
        cached = Cached(sliding_info, flat_pages(shape, paged), indptr, indices, length, k_position, q_position)
        parts = ceildiv(indices.shape[0], tile.part // PAGE)
        subgroups = subgroups_of(shape, tile)
        threads, groups = tile.threads, batch * shape.num_kv_heads
        if shape.subgroup:
            threads, groups = subgroups * shape.subgroup, groups * (shape.group // heads_per_workgroup(shape))

        def part_of(index: Expr, part: Expr, tx: Expr) -> DecodePart | SubgroupPart:
            if shape.subgroup:
                return SubgroupPart(shape, cached, window, index, keep(part * tile.part), tile.part, subgroups)
            return DecodePart(shape, tile, cached, window, index, part * tile.part, tx)

        whole = _Results(shape, out, lse)

        def in_one_part() -> None:
            with launch(threads, groups) as (bx, _, tx):
                part_of(bx, 0, tx).run(q, scale, whole.store_mean, whole.store_lse)

        def in_parts(parts: Expr) -> None:
            values = workspace((parts * batch * shape.num_heads * shape.head_dim,), "float32")
            sums = workspace((parts * batch * shape.num_heads * 2,), "float32")
            with launch(threads, groups, parts) as (bx, by, tx):
                stores = PartResults(shape, batch, by, values, sums)
                part_of(bx, by, tx).run(q, scale, stores.store_values, stores.store_sums)
            merge_parts(shape, batch, lambda row: parts, values, sums, out, lse)

        with I.If(parts <= 1):
            with I.Then():
                in_one_part()
            with I.Else():
                in_parts(parts)

    return function("paged_decode", arguments, body)


def subgroups_of(shape: AttentionShape, tile: DecodeTile) -> int:
    """Subgroups of a workgroup: the most that shared memory allows. Software adapters gain nothing from a second."""
    count = 1 if shape.shuffled else tile.subgroups
    while count > 1 and 4 * count * heads_per_workgroup(shape) * (shape.v_dim + 2) > SHARED_BYTES:
        count //= 2
    return count


def merge_parts(
    shape: AttentionShape,
    batch: Expr,
    parts_of: Callable[[Expr], Expr],
    values: Buffer,
    sums: Buffer,
    out: Buffer,
    lse: Buffer | None,
    first: Expr = 0,
    sinks: Sequence[Buffer] = (),
) -> None:
    """out and lse of all heads from `values` [part, row, D] and `sums` [part, row, (largest score, sum of weights)].

    A row is (b - first, head), of `batch` queries b from `first` on; `parts_of(b)` are its parts; `sinks`: none, or
    logits f32[heads].
    """
    heads, dim, threads = shape.num_heads, shape.v_dim, 64
    with launch(threads, batch * heads) as (row, _, tx):
        largest, weight_sum, total = local(1), local(1), local(1)
        b = keep(first + row // heads)
        parts = parts_of(b)
        put(largest, 0, LOWEST)
        with I.serial(0, parts) as part:
            put(largest, 0, I.max(largest[0], sums[(part * batch * heads + row) * 2]))
        put(weight_sum, 0, 0.0)
        with I.serial(0, parts) as part:
            at = keep((part * batch * heads + row) * 2)
            add(weight_sum, 0, sums[at + 1] * I.exp2(sums[at] - largest[0]))
        put(weight_sum, 0, I.max(with_sink(weight_sum[0], largest[0], sinks, row % heads), I.float32(1e-37)))
        with I.serial(0, ceildiv(dim, threads)) as i:
            d = keep(i * threads + tx)
            with I.If(d < dim), I.Then():
                put(total, 0, 0.0)
                with I.serial(0, parts) as part:
                    at = keep(part * batch * heads + row)
                    add(total, 0, values[at * dim + d] * I.exp2(sums[at * 2] - largest[0]))
                put(out, (b, row % heads, d), total[0] / weight_sum[0])
        if lse is None:
            return
        with I.If(tx == 0), I.Then():
            store_sum(shape, out, lse, b, row % heads, largest[0] + I.log2(weight_sum[0]))
