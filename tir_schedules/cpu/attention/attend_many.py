"""Attention of prefill rows over the pages of their sequences: causal for prompts, bidirectional for encoders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr, function, put
from tir_schedules.cpu.attention.flash import BlockPart, Tiles
from tir_schedules.cpu.attention.keys import BLOCK, BLOCK_PAGES, Panels, page_keys
from tir_schedules.cpu.attention.pages import (
    AttentionShape,
    Pages,
    biases_argument,
    out_argument,
    pages_tensor,
    qkv_argument,
    sinks_argument,
)
from tir_schedules.cpu.attention.query_tile import QueryTile, prefill_queries
from tir_schedules.cpu.vectors import load, scratch, value
from tir_schedules.paged import BIAS_MARGIN, PAGE
from tir_schedules.step import Step, step_argument


def attend_many(
    shape: AttentionShape, scale: float, window: int, tiles: Tiles, bidirectional: bool = False, ahead: bool = False
) -> tirx.PrimFunc:
    """qkv f32[n, row_heads, D], step i32[k], pages int8[P, page_bytes]: out f32[n, heads, v_dim].

    A row sees the keys that are less than `window` positions before it (0: all), and if `bidirectional` also after it,
    or if `ahead` up to the step's `last_key`.
    Heads with sinks have their logits in an argument before `out`, f32[heads]; biases of scores are another one. With
    `shape.ahead` a row sees the first keys of its sequence, as many as the step says; there is no window then.

    Blocks of 64 keys begin at multiples of 64, and masked keys of a block add exactly 0: so a row's result depends
    only on its position and its sequence's keys, not on the chunks of the prompt. (A value that is not finite also
    shows in earlier rows of its tile: 0 times it is NaN.)
    """
    per_task, kv_heads = prefill_queries(shape, tiles), shape.num_kv_heads
    n = tirx.Var("n", "int64")
    arguments = {
        "qkv": qkv_argument(shape, n),
        "step": step_argument(tirx.Var("k", "int64"), shape.page_group),
        "pages": pages_tensor(shape),
        **sinks_argument(shape),
        **biases_argument(shape),
        "out": out_argument(shape, n),
    }

    def body(qkv: Buffer, step: Step, pages: Pages, *rest: Buffer) -> None:
        *extra, out = rest
        sinks, biases = extra[: int(shape.sinks)], extra[int(shape.sinks) :]
        rows, sequences = scratch(n, "int32"), scratch(n, "int32")
        count = _list_tiles(step, per_task, rows, sequences)
        with I.parallel(0, count * kv_heads) as index:
            # Alternate early and late tiles: late ones have more keys, and a thread's share is contiguous.
            i, h = value(index % count), value(index // count)
            tile = value(I.Select(i % 2 == 0, i // 2, count - 1 - i // 2))
            row, sequence = value(rows[tile]), value(sequences[tile])
            queries = value(I.min(per_task, step.row_begin(sequence + 1) - row))
            task = QueryTile(shape, tiles, row, queries, h)
            task.begin(qkv, I.float32(scale))
            _Blocks(task, step, pages, sequence, queries, window, bidirectional, ahead, biases).attend()
            task.finish(sinks, out)

    return function("attend_many", arguments, body)


def _list_tiles(step: Step, per_task: int, rows: Buffer, sequences: Buffer) -> Expr:
    """The number of query tiles of the step; the first row and the sequence of each."""
    count = scratch(1, "int32")
    put(count, 0, I.int32(0))
    with I.serial(0, step.sequences) as s:
        begin, end = value(step.row_begin(s)), value(step.row_begin(s + 1))
        with I.serial(0, (end - begin + per_task - 1) // per_task) as i:
            put(rows, count[0], begin + i * per_task)
            put(sequences, count[0], s)
            put(count, 0, count[0] + 1)
    return value(count[0])


@dataclass(frozen=True)
class _Blocks:
    """The blocks of keys that some consecutive queries of a sequence see, as float32 in panels."""

    task: QueryTile
    step: Step
    pages: Pages
    sequence: Expr
    queries: Expr
    window: int
    bidirectional: bool
    ahead: bool
    biases: Sequence[Buffer] = ()

    def attend(self) -> None:
        """Attention of the task's queries, block after block."""
        shape, state, used = self.task.shape, self.task.state, self.task.used
        first = value(self.step.position(self.task.row0))
        keys = value(self._seen_before(first + self.queries, self.queries - 1))  # of the last query
        oldest = value(I.max(first - self.window + 1, 0)) if self.window else 0  # of the first
        panels = Panels(shape)
        with I.serial(oldest // BLOCK, (keys + BLOCK - 1) // BLOCK) as block:
            begin = value(block * BLOCK)
            block_keys = replace(panels.keys(), biases=self._biases(first - begin) if self.biases else None)
            oldest_page = value(I.max(oldest - begin, 0) // PAGE) if self.window else 0
            with I.serial(oldest_page, I.min((keys - begin + PAGE - 1) // PAGE, BLOCK_PAGES)) as i:
                page = value(self.step.page(self.sequence, block * BLOCK_PAGES + i))
                panels.widen(page_keys(self.pages, [page], self.task.head, None), i)
            whole = begin + BLOCK <= self._seen_before(first + 1, 0)
            if self.window:
                own = first + self.queries if self.bidirectional or self.ahead else keys
                whole = I.And(whole, begin >= own - self.window)
            with I.If(value(whole)):
                with I.Then():
                    state.attend(block_keys, None, used)
                with I.Else():
                    state.attend_part(block_keys, self._part(begin, first - begin, keys - begin, oldest_page), used)

    def _biases(self, first: Expr) -> Callable[[Expr, int], Expr]:
        """The biases of a row's scores for a page of the block from which the first query is so far."""
        shape, width = self.task.shape, 2 * self.task.shape.distances + BIAS_MARGIN

        def vector(r: Expr, i: int) -> Expr:
            head = self.task.head * shape.group + r % shape.group
            distance = i * PAGE - (first + r // shape.group)
            return load(self.biases[0], head * width + distance + shape.distances, 16)

        return vector

    def _part(self, begin: Expr, first: Expr, keys: Expr, oldest_page: Expr) -> BlockPart:
        """What queries see of a block from whose beginning the first query and the end of the keys are so far."""
        group, size = self.task.shape.group, self.task.state.segments[0][1]

        def seen(r: Expr) -> tuple[Expr, Expr]:
            if self.task.shape.ahead:
                return I.int32(0), value(self._seen_before(first, r // group) - begin - 1)
            query = value(first + r // group)
            oldest = query - self.window + 1 if self.window else 0
            if self.ahead:
                return oldest, value(self.step.last_key(self.task.row0 + r // group) - begin)
            if not self.bidirectional:
                return oldest, query
            return oldest, value(I.min(query + self.window, keys) - 1) if self.window else keys - 1

        def reach(row: Expr, size: int) -> tuple[Expr, Expr]:
            if self.bidirectional:
                return oldest_page * PAGE, keys
            if self.task.shape.ahead:
                last = I.min((row + size - 1) // group, self.queries - 1)
                return I.int32(0), value(I.min(self._seen_before(first, last) - begin, keys))
            if self.ahead:
                query = I.min((row + size - 1) // group, self.queries - 1)
                return oldest_page * PAGE, value(self.step.last_key(self.task.row0 + query) + 1 - begin)
            return oldest_page * PAGE, value(I.min(first + (row + size - 1) // group + 1, keys))

        if self.ahead:
            return BlockPart(seen, reach, I.int32(0))
        if not self.bidirectional:
            return BlockPart(seen, reach, I.max(-first * group, 0) // size)
        hidden = I.max((1 - first - self.window) * group, 0) if self.window else I.int32(0)
        return BlockPart(seen, reach, hidden // size)

    def _seen_before(self, end: Expr, query: Expr) -> Expr:
        """The keys that a query of the tile, of position end - 1, sees are before this position."""
        if self.task.shape.ahead:
            return self.step.sees(self.task.row0 + query)
        if self.ahead:
            return self.step.last_key(self.task.row0 + query) + 1
        if not self.bidirectional:
            return end
        length = self.step.keys(self.sequence)
        return I.min(end - 1 + self.window, length) if self.window else length
