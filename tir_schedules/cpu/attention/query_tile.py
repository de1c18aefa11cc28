"""A tile of a prompt's queries with all heads of one KV head."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr
from tir_schedules.cpu.attention.flash import Rows, Tiles, with_sink
from tir_schedules.cpu.attention.pages import AttentionShape
from tir_schedules.cpu.vectors import read, splat, store, total, value


class QueryTile:
    """Some queries with all heads of one KV head, against blocks of keys that it brings to float32."""

    def __init__(self, shape: AttentionShape, tiles: Tiles, row0: Expr, queries: Expr, head: Expr) -> None:
        self.shape, self.row0, self.head = shape, row0, head
        self.used = value(queries * shape.group)
        self.state = Rows(shape, prefill_queries(shape, tiles) * shape.group, tiles, scaled=False)

    def _at(self, r: Expr, heads: int) -> Expr:
        """Where the query and head of row r are in [rows, heads]."""
        group = self.shape.group
        return (self.row0 + r // group) * heads + self.head * group + r % group

    def begin(self, qkv: Buffer, scale: Expr) -> None:
        shape = self.shape
        self.state.begin()
        self.state.load_query(qkv, lambda r: self._at(r, shape.row_heads) * shape.head_dim, scale, self.used)

    def finish(self, sinks: Sequence[Buffer], out: Buffer) -> None:
        """out = weighted mean of values; `sinks`: none, or logits f32[heads]."""
        dim, lanes, state = self.shape.v_dim, self.shape.lanes, self.state
        with I.serial(0, self.used) as r:
            head = self.head * self.shape.group + r % self.shape.group
            weight = with_sink(total(state.sums, r * 16, 16), state.top[r], sinks, head)
            whole = value(I.max(weight, I.float32(1e-37)))
            inverse, row = value(I.float32(1) / whole), value(self._at(r, self.shape.num_heads))
            with I.serial(0, dim // lanes) as i:
                mean = read(state.out, r * dim + i * lanes, lanes) * splat(inverse, lanes)
                store(out, row * dim + i * lanes, mean, lanes)


def prefill_queries(shape: AttentionShape, tiles: Tiles) -> int:
    """Queries of one prefill task: their rows fill register tiles, and are about `task_rows`."""
    step = tiles.max_rows // math.gcd(tiles.max_rows, shape.group)
    return max(1, round(tiles.task_rows / (step * shape.group))) * step
