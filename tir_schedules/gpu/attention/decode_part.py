"""A part of decode attention without subgroups, and how decode divides its work."""

from __future__ import annotations

from dataclasses import dataclass

from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr, add, f32, put
from tir_schedules.gpu.attention.key_part import Finish, Store
from tir_schedules.gpu.attention.pages import AttentionShape, Row, for_dims
from tir_schedules.gpu.attention.scores import score_of
from tir_schedules.gpu.attention.step_keys import Located
from tir_schedules.gpu.kernel import LOWEST, barrier, ceildiv, keep, local, shared
from tir_schedules.paged import PAGE
from tir_schedules.rule import Knobs

SHARED_BYTES = 32768  # of a workgroup, on every target
WEIGHT_LANES = 16  # invocations that compute the weights of one head


@dataclass(frozen=True)
class DecodeTile:
    """How decode divides its work.

    Without subgroups a workgroup has `threads`, a multiple of 16, and keeps the weights of `part` keys at once. An
    invocation takes `keys` at once, which share loads of q, then `columns` of the head dimension, which share loads of
    weights. With subgroups of known size, `subgroups` is the most in a workgroup. `blocks`: workgroups that a sequence
    is split into (`key_split.py`); 0: `part` is a workgroup's keys over TVM's cache, a multiple of them over own pages.
    """

    part: int = 128
    threads: int = 64
    keys: int = 1
    columns: int = 1
    subgroups: int = 4
    blocks: int = 0

    def shared_bytes(self, group: int) -> int:
        """Bytes of shared memory of a workgroup without subgroups."""
        return 4 * (group * self.part + 6 * group + self.threads)


def decode_tile(knobs: Knobs) -> DecodeTile:
    """The tile that the knobs describe."""
    names = ("part", "threads", "keys", "columns", "subgroups", "blocks")
    return DecodeTile(**{name: int(knobs[f"decode_{name}"]) for name in names if f"decode_{name}" in knobs})


class DecodePart:
    """At most `tile.part` keys of one KV head, from `begin` on: scores, their weights, and weighted values.

    `index` is that of (sequence, KV head).
    """

    def __init__(
        self,
        shape: AttentionShape,
        tile: DecodeTile,
        cached: Located,
        window: int,
        index: Expr,
        begin: Expr,
        tx: Expr,
    ) -> None:
        self.shape, self.tile, self.cached, self.tx = shape, tile, cached, tx
        self.b, self.h = keep(index // shape.num_kv_heads), keep(index % shape.num_kv_heads)
        self.page = cached.table(self.b)
        self.keys = cached.keys(self.b)
        self.place(begin)
        self.oldest = cached.oldest(self.b, self.b, window) if window else None
        self.scores = shared(shape.group * tile.part)
        self.totals = shared(2 * shape.group)

    def place(self, begin: Expr) -> None:
        """Take the keys from `begin` on, `tile.part` at most."""
        self.begin = keep(begin)
        self.count = keep(I.max(I.min(self.keys - self.begin, self.tile.part), 0))

    def run(self, q: Buffer, scale: Expr, store: Store, finish: Finish) -> None:
        """store(b, head, d, sum of weighted values, sum of weights), finish(b, head, largest score, sum of weights)."""
        self._scores(q, scale)
        self._weights(finish)
        self._values(store)

    def _scores(self, q: Buffer, scale: Expr) -> None:
        group, threads, tx = self.shape.group, self.tile.threads, self.tx
        per_thread = self.tile.keys
        dots = local(per_thread * group)
        with I.serial(0, ceildiv(self.count, threads * per_thread)) as i:
            keys = [keep(i * (threads * per_thread) + j * threads + tx) for j in range(per_thread)]
            with I.If(keys[0] < self.count), I.Then():
                for at in range(per_thread * group):
                    put(dots, at, 0.0)
                rows = [self._key(t if j == 0 else I.min(t, self.count - 1)) for j, t in enumerate(keys)]

                def multiply(d: Expr, ks: list[Expr]) -> None:
                    for g in range(group):
                        value = f32(q[self.b, self.h * group + g, d])
                        value = value if per_thread == 1 else keep(value)
                        for j, k in enumerate(ks):
                            add(dots, j * group + g, k * value)

                for_dims(rows, multiply)
                for j, t in enumerate(keys):
                    if j == 0:
                        self._store_scores(dots, j, t, scale)
                        continue
                    with I.If(t < self.count), I.Then():
                        self._store_scores(dots, j, t, scale)
        barrier()

    def _key(self, t: Expr) -> Row:
        """The t-th key of the part."""
        token = keep(self.begin + t)
        page = keep(self.page(token // PAGE))
        return self.cached.pages.key(page, self.h, keep(token % PAGE))

    def _store_scores(self, dots: Buffer, j: int, t: Expr, scale: Expr) -> None:
        group = self.shape.group
        for g in range(group):
            score = score_of(self.shape, dots[j * group + g], scale)
            if self.oldest is not None:
                score = I.if_then_else(self.begin + t >= self.oldest, score, I.float32(LOWEST))
            put(self.scores, g * self.tile.part + t, score)

    def _weights(self, finish: Finish) -> None:
        """Scores become weights. Rows of 16 invocations take one head after another."""
        group, part, tx = self.shape.group, self.tile.part, self.tx
        lanes, rows = WEIGHT_LANES, self.tile.threads // WEIGHT_LANES
        partial, largest, total = shared(self.tile.threads), local(1), local(1)
        lane, row = keep(tx % lanes), keep(tx // lanes)
        for first in range(0, group, rows):
            g = keep(I.min(first + row, group - 1))
            put(largest, 0, LOWEST)
            with I.serial(0, ceildiv(self.count, lanes)) as i, I.If(i * lanes + lane < self.count), I.Then():
                put(largest, 0, I.max(largest[0], self.scores[g * part + i * lanes + lane]))
            put(partial, tx, largest[0])
            barrier()
            for other in range(lanes):
                put(largest, 0, I.max(largest[0], partial[row * lanes + other]))
            put(total, 0, 0.0)
            has_head = first + row < group
            with I.If(has_head), I.Then(), I.serial(0, ceildiv(self.count, lanes)) as i:
                at = keep(g * part + i * lanes + lane)
                with I.If(i * lanes + lane < self.count), I.Then():
                    score = keep(self.scores[at])
                    weight = keep(I.if_then_else(score <= I.float32(LOWEST), I.float32(0), I.exp2(score - largest[0])))
                    put(self.scores, at, weight)
                    add(total, 0, weight)
            barrier()
            put(partial, tx, total[0])
            barrier()
            with I.If(I.And(has_head, lane == 0)), I.Then():
                put(total, 0, 0.0)
                for other in range(lanes):
                    add(total, 0, partial[row * lanes + other])
                put(self.totals, 2 * g, largest[0])
                put(self.totals, 2 * g + 1, total[0])
                finish(self.b, self.h * group + g, largest[0], total[0])
            barrier()

    def _values(self, store: Store) -> None:
        group, dim, threads, tx = self.shape.group, self.shape.v_dim, self.tile.threads, self.tx
        part, per_thread = self.tile.part, self.tile.columns
        sums = local(per_thread * group)
        with I.serial(0, ceildiv(dim, threads * per_thread)) as i:
            columns = [keep(i * (threads * per_thread) + j * threads + tx) for j in range(per_thread)]
            with I.If(columns[0] < dim), I.Then():
                for at in range(per_thread * group):
                    put(sums, at, 0.0)
                inside = [columns[0], *(I.min(d, dim - 1) for d in columns[1:])]
                with I.serial(0, self.count) as t:
                    token = keep(self.begin + t)
                    page = keep(self.page(token // PAGE))
                    row = self.cached.pages.value(page, self.h, keep(token % PAGE))
                    vs = [keep(row.at(d)) for d in inside]
                    for g in range(group):
                        weight = self.scores[g * part + t]
                        weight = weight if per_thread == 1 else keep(weight)
                        for j, v in enumerate(vs):
                            add(sums, j * group + g, v * weight)
                for j, d in enumerate(columns):
                    if dim % (threads * per_thread) == 0 or j == 0:
                        self._store_values(store, sums, j, d)
                        continue
                    with I.If(d < dim), I.Then():
                        self._store_values(store, sums, j, d)

    def _store_values(self, store: Store, sums: Buffer, j: int, d: Expr) -> None:
        group = self.shape.group
        for g in range(group):
            store(self.b, self.h * group + g, d, sums[j * group + g], self.totals[2 * g + 1])
