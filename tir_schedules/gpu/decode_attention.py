"""Paged attention of one query a sequence (decode)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.gpu.kernel import (
    LOWEST,
    Buffer,
    Expr,
    add,
    barrier,
    ceildiv,
    f32,
    function,
    keep,
    launch,
    local,
    put,
    shared,
    workspace,
)
from tir_schedules.gpu.key_split import KeySplit
from tir_schedules.gpu.kv_pages import AttentionShape, flat_pages, heads_argument
from tir_schedules.gpu.scores import Cached, cached_arguments, results, score_of
from tir_schedules.gpu.subgroup_attention import Finish, Store, SubgroupPart, heads_of
from tir_schedules.paged import PAGE

SHARED_BYTES = 32768  # of a workgroup, which every target grants
WEIGHT_LANES = 16  # invocations that make the weights of one head


@dataclass(frozen=True)
class DecodeTile:
    """How decode divides its work.

    `part`: keys of one part of a sequence, a workgroup each, merged by a second kernel. `threads` of a workgroup, a
    multiple of 16; each has `keys` at once, then `columns` of the head dimension: so many share what it reads beside
    them. `subgroups` of a workgroup at most, where their size is known; the others do not matter there. `blocks`, there
    too: parts as long as it takes to make so many workgroups of a sequence, `key_split.py`.
    """

    part: int = 128
    threads: int = 64
    keys: int = 1
    columns: int = 1
    subgroups: int = 4
    blocks: int = 0

    def shared_bytes(self, group: int) -> int:
        """Shared memory of a workgroup without subgroups."""
        return 4 * (group * self.part + 2 * group + self.threads)


def decode_tile(knobs: Mapping[str, int | str]) -> DecodeTile:
    """The tile that knobs say."""
    names = ("part", "threads", "keys", "columns", "subgroups", "blocks")
    return DecodeTile(**{name: int(knobs[f"decode_{name}"]) for name in names if f"decode_{name}" in knobs})


def decode(
    shape: AttentionShape, window: int, sliding_info: bool, tile: DecodeTile = DecodeTile()
) -> tirx.PrimFunc:
    """One query a sequence against its pages: q and output [B, heads, D], lse f32[B, heads] in base 2.

    A workgroup has a part of the keys of one KV head, with all query heads of its group; the parts are merged
    (Dao et al. 2023, "Flash-Decoding for long-context inference").
    """
    heads, dim = shape.num_heads, shape.head_dim
    batch = tirx.Var("batch", "int32")
    arguments = {
        "q": heads_argument(shape, batch),
        **cached_arguments(shape, batch, batch, sliding_info),
        **results(shape, batch),
    }

    def body(q: Buffer, paged: Buffer, indptr: Buffer, indices: Buffer, *rest: Buffer) -> None:
        length, k_position, q_position, out, lse = rest[:5]
        scale = rest[-1]
        cached = Cached(sliding_info, flat_pages(shape, paged), indptr, indices, length, k_position, q_position)
        parts = ceildiv(indices.shape[0], tile.part // PAGE)
        split = KeySplit.of(shape, window, tile.blocks, _subgroups(shape, tile))
        subgroups = split.subgroups if split is not None else _subgroups(shape, tile)
        threads, groups = tile.threads, batch * shape.num_kv_heads
        if shape.subgroup:
            threads, groups = subgroups * shape.subgroup, groups * (shape.group // heads_of(shape))

        def task(index: Expr, part: Expr, tx: Expr) -> _DecodePart | SubgroupPart:
            if shape.subgroup:
                return SubgroupPart(shape, cached, window, index, keep(part * tile.part), tile.part, subgroups)
            return _DecodePart(shape, tile, cached, window, index, part, tx)

        def at_least(total: Expr) -> Expr:
            return I.max(total, I.float32(1e-37))

        def finish(b: Expr, head: Expr, top: Expr, total: Expr) -> None:
            put(lse, (b, head), top + I.log2(at_least(total)))

        def mean(b: Expr, head: Expr, d: Expr, sum_: Expr, total: Expr) -> None:
            put(out, (b, head, d), sum_ / at_least(total))

        def in_one() -> None:
            with launch(threads, groups) as (bx, _, tx):
                task(bx, 0, tx).run(q, scale, mean, finish)

        def in_parts(parts: Expr) -> None:
            values = workspace((parts * batch * heads * dim,), "float32")
            sums = workspace((parts * batch * heads * 2,), "float32")
            with launch(threads, groups, parts) as (bx, by, tx):

                def at(b: Expr, head: Expr) -> Expr:
                    return (by * batch + b) * heads + head

                def keep_sums(b: Expr, head: Expr, top: Expr, total: Expr) -> None:
                    put(sums, at(b, head) * 2, top)
                    put(sums, at(b, head) * 2 + 1, total)

                def keep_values(b: Expr, head: Expr, d: Expr, sum_: Expr, total: Expr) -> None:
                    put(values, at(b, head) * dim + d, sum_)

                if split is None:
                    task(bx, by, tx).run(q, scale, keep_values, keep_sums)
                else:
                    split.run(cached, bx, by, lambda part: part.run(q, scale, keep_values, keep_sums))
            if split is None:
                _merge_parts(shape, batch, parts, values, sums, out, lse)
            else:
                split.merge(cached, batch, values, sums, mean, finish)

        with I.If(parts <= 1):
            with I.Then():
                in_one()
            with I.Else():
                in_parts(parts if split is None else split.parts)

    return function("paged_decode", arguments, body)


def _subgroups(shape: AttentionShape, tile: DecodeTile) -> int:
    """Subgroups of a workgroup, so that each has a block of keys of a part. Software adapters have no use for two."""
    count = 1 if shape.shuffled else tile.subgroups
    while count > 1 and 4 * count * heads_of(shape) * (shape.head_dim + 2) > SHARED_BYTES:
        count //= 2
    return count


class _DecodePart:
    """The scores of a part of the keys for the heads of one group, their weights, and the weighted values."""

    def __init__(
        self,
        shape: AttentionShape,
        tile: DecodeTile,
        cached: Cached,
        window: int,
        index: Expr,
        part: Expr,
        tx: Expr,
    ) -> None:
        self.shape, self.tile, self.cached, self.tx = shape, tile, cached, tx
        self.b, self.h = keep(index // shape.num_kv_heads), keep(index % shape.num_kv_heads)
        keys = cached.keys(self.b)
        self.begin = keep(part * tile.part)
        self.count = keep(I.max(I.min(keys - self.begin, tile.part), 0))
        self.oldest = cached.oldest(self.b, self.b, window) if window else None
        self.scores = shared(shape.group * tile.part)
        self.totals = shared(2 * shape.group)

    def run(
        self,
        q: Buffer,
        scale: Expr,
        store: Store,
        finish: Finish,
    ) -> None:
        """store(b, head, d, sum of weighted values, sum of weights), finish(b, head, largest score, sum of weights)."""
        self._scores(q, scale)
        self._weights(finish)
        self._values(store)

    def _scores(self, q: Buffer, scale: Expr) -> None:
        group, dim, threads, tx = self.shape.group, self.shape.head_dim, self.tile.threads, self.tx
        each = self.tile.keys
        dots = local(each * group)
        with I.serial(0, ceildiv(self.count, threads * each)) as i:
            keys = [keep(i * (threads * each) + j * threads + tx) for j in range(each)]
            with I.If(keys[0] < self.count), I.Then():
                for at in range(each * group):
                    put(dots, at, 0.0)
                first = [self._key(t if j == 0 else I.min(t, self.count - 1)) for j, t in enumerate(keys)]
                with I.serial(0, dim) as d:
                    ks = [keep(f32(self.cached.pages.data[at + d * PAGE])) for at in first]
                    for g in range(group):
                        value = f32(q[self.b, self.h * group + g, d])
                        value = value if each == 1 else keep(value)
                        for j, k in enumerate(ks):
                            add(dots, j * group + g, k * value)
                for j, t in enumerate(keys):
                    if j == 0:
                        self._store_scores(dots, j, t, scale)
                        continue
                    with I.If(t < self.count), I.Then():
                        self._store_scores(dots, j, t, scale)
        barrier()

    def _key(self, t: Expr) -> Expr:
        """Where the t-th key of the part begins."""
        token = keep(self.begin + t)
        page = keep(self.cached.page(self.b, token // PAGE))
        return keep(self.cached.pages.k(page, self.h, token % PAGE, 0))

    def _store_scores(self, dots: Buffer, j: int, t: Expr, scale: Expr) -> None:
        group = self.shape.group
        for g in range(group):
            score = score_of(self.shape, dots[j * group + g], scale)
            if self.oldest is not None:
                score = I.if_then_else(self.begin + t >= self.oldest, score, I.float32(LOWEST))
            put(self.scores, g * self.tile.part + t, score)

    def _weights(self, finish: Finish) -> None:
        """Scores become weights; a row of 16 invocations takes each head, in turns."""
        group, part, tx = self.shape.group, self.tile.part, self.tx
        lanes, rows = WEIGHT_LANES, self.tile.threads // WEIGHT_LANES
        partial, best, total = shared(self.tile.threads), local(1), local(1)
        lane, row = keep(tx % lanes), keep(tx // lanes)
        for turn in range(-(-group // rows)):
            g = keep(I.min(turn * rows + row, group - 1))
            put(best, 0, LOWEST)
            with I.serial(0, ceildiv(self.count, lanes)) as i, I.If(i * lanes + lane < self.count), I.Then():
                put(best, 0, I.max(best[0], self.scores[g * part + i * lanes + lane]))
            put(partial, tx, best[0])
            barrier()
            for other in range(lanes):
                put(best, 0, I.max(best[0], partial[row * lanes + other]))
            put(total, 0, 0.0)
            mine = turn * rows + row < group
            with I.If(mine), I.Then(), I.serial(0, ceildiv(self.count, lanes)) as i:
                at = keep(g * part + i * lanes + lane)
                with I.If(i * lanes + lane < self.count), I.Then():
                    score = keep(self.scores[at])
                    weight = keep(I.if_then_else(score > I.float32(LOWEST), I.exp2(score - best[0]), I.float32(0)))
                    put(self.scores, at, weight)
                    add(total, 0, weight)
            barrier()
            put(partial, tx, total[0])
            barrier()
            with I.If(I.And(mine, lane == 0)), I.Then():
                put(total, 0, 0.0)
                for other in range(lanes):
                    add(total, 0, partial[row * lanes + other])
                put(self.totals, 2 * g, best[0])
                put(self.totals, 2 * g + 1, total[0])
                finish(self.b, self.h * group + g, best[0], total[0])
            barrier()

    def _values(self, store: Store) -> None:
        group, dim, threads, tx = self.shape.group, self.shape.head_dim, self.tile.threads, self.tx
        part, each = self.tile.part, self.tile.columns
        sums = local(each * group)
        with I.serial(0, ceildiv(dim, threads * each)) as i:
            columns = [keep(i * (threads * each) + j * threads + tx) for j in range(each)]
            with I.If(columns[0] < dim), I.Then():
                for at in range(each * group):
                    put(sums, at, 0.0)
                inside = [columns[0], *(I.min(d, dim - 1) for d in columns[1:])]
                with I.serial(0, self.count) as t:
                    token = keep(self.begin + t)
                    page = keep(self.cached.page(self.b, token // PAGE))
                    first = self.cached.pages.v(page, self.h, token % PAGE, 0)
                    vs = [keep(f32(self.cached.pages.data[first + d])) for d in inside]
                    for g in range(group):
                        weight = self.scores[g * part + t]
                        weight = weight if each == 1 else keep(weight)
                        for j, v in enumerate(vs):
                            add(sums, j * group + g, v * weight)
                for j, d in enumerate(columns):
                    if dim % (threads * each) == 0 or j == 0:
                        self._store_values(store, sums, j, d)
                        continue
                    with I.If(d < dim), I.Then():
                        self._store_values(store, sums, j, d)

    def _store_values(self, store: Store, sums: Buffer, j: int, d: Expr) -> None:
        group = self.shape.group
        for g in range(group):
            store(self.b, self.h * group + g, d, sums[j * group + g], self.totals[2 * g + 1])


def _merge_parts(
    shape: AttentionShape, batch: Expr, parts: Expr, values: Buffer, sums: Buffer, out: Buffer, lse: Buffer
) -> None:
    """out and lse of all heads from the sums of values, largest scores and sums of weights of the parts."""
    heads, dim, threads = shape.num_heads, shape.head_dim, 64
    with launch(threads, batch * heads) as (row, _, tx):
        top, whole, total = local(1), local(1), local(1)
        put(top, 0, LOWEST)
        with I.serial(0, parts) as part:
            put(top, 0, I.max(top[0], sums[(part * batch * heads + row) * 2]))
        put(whole, 0, 0.0)
        with I.serial(0, parts) as part:
            at = keep((part * batch * heads + row) * 2)
            add(whole, 0, sums[at + 1] * I.exp2(sums[at] - top[0]))
        put(whole, 0, I.max(whole[0], I.float32(1e-37)))
        with I.serial(0, ceildiv(dim, threads)) as i:
            d = keep(i * threads + tx)
            with I.If(d < dim), I.Then():
                put(total, 0, 0.0)
                with I.serial(0, parts) as part:
                    at = keep(part * batch * heads + row)
                    add(total, 0, values[at * dim + d] * I.exp2(sums[at * 2] - top[0]))
                put(out, (row // heads, row % heads, d), total[0] / whole[0])
        with I.If(tx == 0), I.Then():
            put(lse, (row // heads, row % heads), top[0] + I.log2(whole[0]))
