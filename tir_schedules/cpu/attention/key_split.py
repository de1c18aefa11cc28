"""Attention of decode rows: parts of the keys are computed in parallel and then merged.

Dao et al. 2023, "Flash-Decoding for long-context inference". How a row's keys are split depends only on their number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr, put
from tir_schedules.cpu.attention.flash import LOWEST, Rows, Seen, Tiles, with_sink
from tir_schedules.cpu.attention.keys import BLOCK_PAGES, Keys, Panels, page_keys, walk
from tir_schedules.cpu.attention.pages import AttentionShape, Pages
from tir_schedules.cpu.vectors import exp2, read, scratch, splat, store, total, value
from tir_schedules.paged import PAGE
from tir_schedules.step import Step

# The most parts of a query's keys, times KV heads: enough for the threads of any CPU.
_MAX_PARTS = 128


@dataclass(frozen=True)
class RowKeys:
    """The keys that each row attends to: those of its sequence up to its own."""

    pages: Pages
    step: Step

    def page(self, row: Expr, i: Expr) -> Expr:
        """The page of keys 16 i ... 16 i + 15 of a row."""
        return self.step.page(self.step.sequence(row), i)


@dataclass(frozen=True)
class _KeySplit:
    """How the pages of a row's keys are split into parts."""

    step: Step
    window: int
    part_pages: int
    max_parts: int

    def span(self, b: Expr) -> tuple[Expr, Expr, Expr, Expr]:
        """Keys of row b, the oldest that it sees, that key's page, and pages per part."""
        step = self.max_parts * self.part_pages
        keys = value(self.step.position(b) + 1)
        oldest = I.int32(0)
        if self.window:
            oldest = value(I.max(self.step.position(b) - self.window + 1, 0))
        first = value(I.min(oldest, keys) // PAGE)
        pages = (keys + PAGE - 1) // PAGE - first
        share = value((pages + step - 1) // step * self.part_pages)
        return keys, oldest, first, share

    def count(self, batch: Expr) -> Expr:
        """Parts of the row that needs most."""
        parts = scratch(1, "int32")
        put(parts, 0, I.int32(1))
        with I.serial(0, batch) as b:
            keys, _, first, share = self.span(b)
            pages = (keys + PAGE - 1) // PAGE - first
            put(parts, 0, I.max(parts[0], (pages + share - 1) // I.max(share, 1)))
        return value(parts[0])


@dataclass(frozen=True)
class Queries:
    """Of `count` rows, in `buffer`: query r of KV head h of row b begins at `at(b, h, r)`; `scale` is of scores."""

    buffer: Buffer
    count: Expr
    at: Callable[[Expr, Expr, Expr], Expr]
    scale: Expr


def attend_in_parts(
    shape: AttentionShape, tiles: Tiles, row_keys: RowKeys, window: int, queries: Queries, sinks: Sequence[Buffer],
    Out: Buffer,
) -> None:  # fmt: skip
    """Attention of all rows: Out f32[count, heads, v_dim]. Runs in parallel over parts of the keys, rows and KV heads.

    `sinks`: none, or logits f32[heads].
    """
    heads, kv_heads, dim, group, batch = shape.num_heads, shape.num_kv_heads, shape.v_dim, shape.group, queries.count
    key_split = _KeySplit(row_keys.step, window, tiles.part_pages, max(1, _MAX_PARTS // kv_heads))
    count = key_split.count(batch)
    part_out = scratch(key_split.max_parts * batch * heads * dim)
    part_top, part_sum = (scratch(key_split.max_parts * batch * heads) for _ in range(2))
    with I.parallel(0, count * batch * kv_heads) as task:
        part, b, h = value(task // (batch * kv_heads)), value(task // kv_heads % batch), value(task % kv_heads)
        keys, oldest, first, share = key_split.span(b)
        begin = value(first + part * share)
        end = value(I.min(begin + share, (keys + PAGE - 1) // PAGE))
        state = Rows(shape, group, tiles, scaled=not shape.latent)
        state.begin()
        state.load_query(queries.buffer, lambda r: queries.at(b, h, r), queries.scale)
        _attend_part(row_keys, state, (b, h), (begin, end), keys, oldest)
        with I.serial(0, group) as r:
            put(part_top, task * group + r, state.top[r])
            put(part_sum, task * group + r, total(state.sums, r * 16, 16))
        with I.serial(0, group * dim // shape.lanes) as i:
            at = task * (group * dim) + i * shape.lanes
            store(part_out, at, read(state.out, i * shape.lanes, shape.lanes), shape.lanes)
    _merge_parts(shape, batch, count, (part_out, part_top, part_sum), sinks, Out)


def _attend_part(
    row_keys: RowKeys, state: Rows, item: tuple[Expr, Expr], part: tuple[Expr, Expr], keys: Expr, oldest: Expr
) -> None:
    """Attention of `state` over a part of the pages. `item`: row and KV head; `part`: first page, end."""
    (b, h), (begin, end) = item, part
    panels = Panels(row_keys.pages.shape) if row_keys.pages.shape.latent else None

    def fold(found: Keys, seen: Seen | None) -> None:
        if panels is None:
            return state.attend(found, seen)
        panels.widen(found)  # once for all heads
        state.attend(panels.keys(len(found.k), found.valid), seen)

    def whole(p: Expr) -> Expr:
        return I.And((p + BLOCK_PAGES) * PAGE <= keys, p * PAGE >= oldest)

    def block(p: Expr) -> None:
        # Prefetch the next block of this head, or the first of the next head, which this thread most likely gets.
        last = value(p + BLOCK_PAGES >= end)
        next_p = value(I.Select(last, begin, p + BLOCK_PAGES))
        ahead = [row_keys.page(b, I.min(next_p + i, end - 1)) for i in range(BLOCK_PAGES)]
        where = [row_keys.page(b, p + i) for i in range(BLOCK_PAGES)]
        fold(page_keys(row_keys.pages, where, h, None, (ahead, value(h + I.cast(last, "int32")))), None)

    def page(p: Expr) -> None:
        valid = value(I.min(keys - p * PAGE, PAGE))
        page = page_keys(row_keys.pages, [row_keys.page(b, p)], h, valid)
        fold(page, lambda r: (oldest - p * PAGE, valid - 1))

    walk(begin, end, whole, block, page)


def _merge_parts(
    shape: AttentionShape,
    batch: Expr,
    count: Expr,
    parts: tuple[Buffer, Buffer, Buffer],
    sinks: Sequence[Buffer],
    Out: Buffer,
) -> None:
    """Out of all heads from `count` parts: sums of values, largest scores, and sums of weights."""
    part_out, part_top, part_sum = parts
    lanes, dim, rows = shape.lanes, shape.v_dim, batch * shape.num_heads

    def head(row: Expr) -> None:
        sums = [scratch(lanes) for _ in range(dim // lanes)]
        top, weight = scratch(1), scratch(1)
        put(top, 0, I.float32(LOWEST))
        with I.serial(0, count) as part:
            put(top, 0, I.max(top[0], part_top[part * rows + row]))
        put(weight, 0, I.float32(0))
        for acc in sums:
            store(acc, 0, splat(0.0, lanes), lanes)
        with I.serial(0, count) as part:
            share = value(exp2(part_top[part * rows + row] - top[0], 1))
            put(weight, 0, weight[0] + share * part_sum[part * rows + row])
            for i, acc in enumerate(sums):
                values = read(part_out, (part * rows + row) * dim + i * lanes, lanes)
                store(acc, 0, read(acc, 0, lanes) + splat(share, lanes) * values, lanes)
        whole = value(I.max(with_sink(weight[0], top[0], sinks, row % shape.num_heads), I.float32(1e-37)))
        inverse = value(I.float32(1) / whole)
        for i, acc in enumerate(sums):
            store(Out, row * dim + i * lanes, read(acc, 0, lanes) * splat(inverse, lanes), lanes)

    with I.If(value(count < 2)):
        with I.Then(), I.serial(0, rows) as row:
            head(row)
        with I.Else(), I.parallel(0, rows) as row:
            head(row)
