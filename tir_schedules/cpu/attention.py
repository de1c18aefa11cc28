"""Paged attention for CPUs: decode, prefill over cached pages, prefill over the current chunk.

The functions have the calling convention that TVM's `vm.builtin.paged_attention_kv_cache_create` expects
(tvm/src/runtime/vm/paged_kv_cache.cc, attn_backend.h); `kv_pages.py` says what pages, queries and outputs hold.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.cpu.flash import BLOCK, BLOCK_PAGES, LOWEST, Keys, Rows, Tiles
from tir_schedules.cpu.kv_pages import (
    ACTIVATION_DTYPES,
    AttentionShape,
    Pages,
    append,
    compact,
    copy_page,
    heads_argument,
    index_argument,
    kv_argument,
    kv_dtypes,
    kv_row,
    merge,
    pages_argument,
    read_back,
    split,
    sums_argument,
)
from tir_schedules.cpu.vectors import (
    Buffer,
    Expr,
    exp2,
    function,
    load,
    prefetch,
    put,
    read,
    scratch,
    splat,
    store,
    total,
    value,
)
from tir_schedules.op import Op, by_hand
from tir_schedules.paged import PAGE, Cached, cached_arguments, heads_of, results, window_of

__all__ = ["ACTIVATION_DTYPES", "PAGE", "AttentionShape", "kv_cache_functions", "kv_dtypes"]

# Parts of one sequence's keys that decode makes at most, for all KV heads: enough for the threads of any CPU.
_PARTS = 128
DECODE = Tiles()
# A task with more rows than the 32 of a chunk's has more of them that see only a part of their last keys; of cached
# keys each task makes float32 for itself.
CHUNK, CACHED = Tiles(16, 4, task_rows=32), Tiles(16, 4, task_rows=128)


def _page_keys(
    pages: Pages, where: list[Expr], head: Expr, valid: Expr | None, ahead: tuple[list[Expr], Expr] | None = None
) -> Keys:
    """Keys and values of a head in some pages, as they are stored; `ahead`: pages and head to ask for meanwhile."""
    k, v = [value(pages.k(page, head)) for page in where], [value(pages.v(page, head)) for page in where]

    scale = None
    if pages.scales is not None:
        first = [[value(pages.scale(page, head, of_v)) for page in where] for of_v in (0, 1)]
        scale = lambda i, g, of_v: first[of_v][i] + g * PAGE
    fetch = None
    if ahead is not None:
        begin = [[value(at(page, ahead[1])) for page in ahead[0]] for at in (pages.k, pages.v)]
        fetch = lambda i, j, of_v: prefetch(pages.elements, begin[of_v][i] + j)
    return Keys(pages.elements, pages.elements, k, v, pages.scales, scale, fetch, pages.line, valid)


def _walk(
    begin: Expr, end: Expr, whole: Callable[[Expr], Expr], block: Callable[[Expr], None], page: Callable[[Expr], None]
) -> None:
    """block(p) for 4 pages from p where whole(p), else page(p), until `end`."""
    at = scratch(1, "int32")
    put(at, 0, begin)
    with I.While(at[0] < end):
        p = value(at[0])
        with I.If(value(I.And(p + BLOCK_PAGES <= end, whole(p)))):
            with I.Then():
                block(p)
                put(at, 0, p + BLOCK_PAGES)
            with I.Else():
                page(p)
                put(at, 0, p + 1)


def decode(shape: AttentionShape, window: int, sliding_info: bool, tiles: Tiles) -> tirx.PrimFunc:
    """One query a sequence against its pages: q and output f32[B, heads, D], lse f32[B, heads] in base 2.

    In parallel over parts of the keys, sequences and KV heads; then the parts are merged (Dao et al. 2023,
    "Flash-Decoding for long-context inference"). How many parts follows from the lengths alone.
    """
    heads, kv_heads, dim, group = shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.group
    most = max(1, _PARTS // kv_heads)

    batch = tirx.Var("batch", "int32")
    arguments = {
        "q": heads_argument(shape, batch),
        **cached_arguments(pages_argument(shape), index_argument, batch, batch, sliding_info),
        **results(heads_argument(shape, batch), sums_argument(shape, batch)),
    }

    def body(Q: Buffer, *rest: Any) -> None:
        cached = Cached(sliding_info, *rest[:6])
        Out, Lse, scale = *rest[6:8], rest[-1]

        def span(b: Expr) -> tuple[Expr, Expr, Expr, Expr]:
            """Keys of sequence b, the oldest that is seen, its page, and the pages of a part."""
            keys = value(cached.keys(b))
            oldest = value(I.max(cached.q_position[b] - cached.k_position[b] - window + 1, 0)) if window else I.int32(0)
            first = value(I.min(oldest, keys) // PAGE)
            pages = (keys + PAGE - 1) // PAGE - first
            share = value((pages + most * tiles.part_pages - 1) // (most * tiles.part_pages) * tiles.part_pages)
            return keys, oldest, first, share

        parts = scratch(1, "int32")
        put(parts, 0, I.int32(1))
        with I.serial(0, batch) as b:
            keys, _, first, share = span(b)
            pages = (keys + PAGE - 1) // PAGE - first
            put(parts, 0, I.max(parts[0], (pages + share - 1) // I.max(share, 1)))
        count = value(parts[0])
        part_out = scratch(most * batch * heads * dim)
        part_top, part_sum = scratch(most * batch * heads), scratch(most * batch * heads)
        with I.parallel(0, count * batch * kv_heads) as task:
            part, b, h = value(task // (batch * kv_heads)), value(task // kv_heads % batch), value(task % kv_heads)
            keys, oldest, first, share = span(b)
            begin = value(first + part * share)
            end = value(I.min(begin + share, (keys + PAGE - 1) // PAGE))
            state = Rows(shape, group, tiles, scaled=True)
            state.begin()
            state.load_query(Q, lambda r: (b * heads + h * group + r) * dim, scale)

            def whole(p: Expr) -> Expr:
                return I.And((p + BLOCK_PAGES) * PAGE <= keys, p * PAGE >= oldest)

            def block(p: Expr) -> None:
                # The next block of this head, or the first of the next head, which this thread most likely gets.
                last = value(p + BLOCK_PAGES >= end)
                next_p = value(I.Select(last, begin, p + BLOCK_PAGES))
                ahead = [cached.page(b, I.min(next_p + i, end - 1)) for i in range(BLOCK_PAGES)]
                where = [cached.page(b, p + i) for i in range(BLOCK_PAGES)]
                state.attend(_page_keys(cached.pages, where, h, None, (ahead, value(h + I.cast(last, "int32")))), None)

            def page(p: Expr) -> None:
                valid = value(I.min(keys - p * PAGE, PAGE))
                one = _page_keys(cached.pages, [cached.page(b, p)], h, valid)
                state.attend(one, lambda r: (oldest - p * PAGE, valid - 1))

            _walk(begin, end, whole, block, page)
            with I.serial(0, group) as r:
                put(part_top, task * group + r, state.top[r])
                put(part_sum, task * group + r, total(state.sums, r * 16, 16))
            with I.serial(0, group * dim // shape.lanes) as i:
                at = task * (group * dim) + i * shape.lanes
                store(part_out, at, read(state.out, i * shape.lanes, shape.lanes), shape.lanes)
        _merge_parts(shape, batch, count, (part_out, part_top, part_sum), Out, Lse)

    return function("paged_decode", arguments, body)


def _merge_parts(
    shape: AttentionShape, batch: Expr, count: Expr, parts: tuple[Buffer, Buffer, Buffer], Out: Buffer, Lse: Buffer
) -> None:
    """Out and Lse of all heads from `count` parts: sums of values, largest scores, and sums of weights."""
    part_out, part_top, part_sum = parts
    lanes, dim, rows = shape.lanes, shape.head_dim, batch * shape.num_heads

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
        whole = value(I.max(weight[0], I.float32(1e-37)))
        inverse = value(I.float32(1) / whole)
        for i, acc in enumerate(sums):
            store(Out, row * dim + i * lanes, read(acc, 0, lanes) * splat(inverse, lanes), lanes)
        put(Lse, row, top[0] + I.log2(whole))

    with I.If(value(count < 2)):
        with I.Then(), I.serial(0, rows) as row:
            head(row)
        with I.Else(), I.parallel(0, rows) as row:
            head(row)


class _PrefillTask:
    """Some queries with all heads of one KV head, against blocks of keys that it brings to float32."""

    def __init__(self, shape: AttentionShape, tiles: Tiles, row0: Expr, queries: Expr, head: Expr) -> None:
        self.shape, self.row0, self.head = shape, row0, head
        self.used = value(queries * shape.group)
        self.state = Rows(shape, prefill_queries(shape, tiles) * shape.group, tiles, scaled=False)

    def at(self, r: Expr) -> Expr:
        """The row of q, output and lse of row r: [query, head]."""
        group = self.shape.group
        return (self.row0 + r // group) * self.shape.num_heads + self.head * group + r % group

    def begin(self, Q: Buffer, scale: Expr) -> None:
        self.state.begin()
        self.state.load_query(Q, lambda r: self.at(r) * self.shape.head_dim, scale, self.used)

    def finish(self, Out: Buffer, Lse: Buffer) -> None:
        """Out = weighted mean of values, Lse = log2 of the sum of 2**score."""
        dim, lanes, state = self.shape.head_dim, self.shape.lanes, self.state
        with I.serial(0, self.used) as r:
            whole = value(I.max(total(state.sums, r * 16, 16), I.float32(1e-37)))
            inverse, row = value(I.float32(1) / whole), value(self.at(r))
            with I.serial(0, dim // lanes) as i:
                mean = read(state.out, r * dim + i * lanes, lanes) * splat(inverse, lanes)
                store(Out, row * dim + i * lanes, mean, lanes)
            put(Lse, row, state.top[r] + I.log2(whole))


def prefill_queries(shape: AttentionShape, tiles: Tiles) -> int:
    """Queries of one prefill task: their rows fill register tiles, and are about `task_rows`."""
    step = tiles.max_rows // math.gcd(tiles.max_rows, shape.group)
    return max(1, round(tiles.task_rows / (step * shape.group))) * step


def prefill_cached(shape: AttentionShape, window: int, sliding_info: bool, tiles: Tiles) -> tirx.PrimFunc:
    """Queries of the current chunk against the pages of tokens before it: q and output f32[n, heads, D].

    Sequence b has rows q_indptr[b]:q_indptr[b+1]. All cached keys precede the chunk, so only the window masks.
    """
    dim, group, per_task = shape.head_dim, shape.group, prefill_queries(shape, tiles)

    batch, n = tirx.Var("batch", "int32"), tirx.Var("n", "int32")
    arguments = {
        "q": heads_argument(shape, n),
        "q_indptr": index_argument(batch + 1),
        **cached_arguments(pages_argument(shape), index_argument, batch, n, sliding_info),
        **results(heads_argument(shape, n), sums_argument(shape, n), causal=True),
    }

    def body(Q: Buffer, q_indptr: Buffer, *rest: Any) -> None:
        cached = Cached(sliding_info, *rest[:6])
        Out, Lse, scale = *rest[6:8], rest[-1]
        with I.serial(0, batch) as b:
            count = q_indptr[b + 1] - q_indptr[b]
            with I.parallel(0, (count + per_task - 1) // per_task * shape.num_kv_heads) as index:
                h = value(index % shape.num_kv_heads)
                row0 = value(q_indptr[b] + index // shape.num_kv_heads * per_task)
                queries = value(I.min(per_task, q_indptr[b + 1] - row0))
                task = _PrefillTask(shape, tiles, row0, queries, h)
                task.begin(Q, scale)
                keys = value(cached.keys(b))
                # The oldest key that the first and the last query see, counted from the first in the cache.
                oldest = value(cached.q_position[row0] - cached.k_position[b] - window + 1) if window else None
                first = 0 if oldest is None else value(I.min(I.max(oldest, 0), keys) // PAGE)
                panel_k, panel_v = scratch(BLOCK * dim), scratch(BLOCK * dim)

                def panel(pages: int, p: Expr, valid: Expr | None) -> Keys:
                    where = [value(cached.page(b, p + i)) for i in range(pages)]
                    source = _page_keys(cached.pages, where, h, valid)
                    _widen(shape, source, panel_k, panel_v)
                    offsets = [i * PAGE * dim for i in range(pages)]
                    return Keys(panel_k, panel_v, offsets, offsets, valid=valid)

                def whole(p: Expr) -> Expr:
                    inside = (p + BLOCK_PAGES) * PAGE <= keys
                    return inside if oldest is None else I.And(inside, p * PAGE >= oldest + queries - 1)

                def page(p: Expr) -> None:
                    valid = value(I.min(keys - p * PAGE, PAGE))

                    def seen(r: Expr) -> tuple[Expr, Expr]:
                        return (0 if oldest is None else oldest + r // group - p * PAGE), valid - 1

                    task.state.attend(panel(1, p, valid), seen, task.used)

                _walk(
                    first,
                    (keys + PAGE - 1) // PAGE,
                    whole,
                    lambda p: task.state.attend(panel(BLOCK_PAGES, p, None), None, task.used),
                    page,
                )
                task.finish(Out, Lse)

    return function("paged_prefill", arguments, body)


def _widen(shape: AttentionShape, source: Keys, panel_k: Buffer, panel_v: Buffer) -> None:
    """The K and V of some pages as float32 in panels, page after page. Slots without a token stay as they are."""
    dim, lanes, groups = shape.head_dim, shape.lanes, max(1, shape.scale_groups)
    depth = dim // groups
    for i, (k, v) in enumerate(zip(source.k, source.v)):
        with I.serial(0, groups) as g:
            scale = None if source.scales is None else value(load(source.scales, source.scale(i, g, 0), 16))
            with I.serial(0, depth) as d:
                item = load(source.k_elements, k + (g * depth + d) * PAGE, 16)
                store(panel_k, (i * dim + g * depth + d) * PAGE, item if scale is None else item * scale, 16)
        slots = PAGE if source.valid is None else source.valid
        with I.serial(0, slots) as slot, I.serial(0, groups) as g:
            scale = None if source.scales is None else value(load(source.scales, source.scale(i, g, 1) + slot, 1))
            with I.serial(0, depth // lanes) as j:
                at = slot * dim + g * depth + j * lanes
                item = load(source.v_elements, v + at, lanes)
                store(panel_v, i * PAGE * dim + at, item if scale is None else item * splat(scale, lanes), lanes)


def prefill_chunk(shape: AttentionShape, tiles: Tiles) -> tirx.PrimFunc:
    """Causal attention of the current chunk with itself (TVM's "ragged" prefill): q and output f32[n, heads, D].

    K and V are those that `split` made for the cache, so that a token sees the same ones in every chunk.
    The chunk is never longer than the sliding window (compiler/export.py caps it), so the window cannot mask.
    """
    kv_heads, dim, group, per_task = shape.num_kv_heads, shape.head_dim, shape.group, prefill_queries(shape, tiles)

    batch, n, kv_n = (tirx.Var(name, "int32") for name in ("batch", "n", "kv_n"))
    arguments = {
        "q": heads_argument(shape, n),
        "q_indptr": index_argument(batch + 1),
        "k": kv_argument(shape, kv_n),
        "v": kv_argument(shape, kv_n),
        "kv_indptr": index_argument(batch + 1),
        "q_position": index_argument(n),
        "k_position": index_argument(batch),
        **results(heads_argument(shape, n), sums_argument(shape, n), causal=True),
    }

    def body(Q: Buffer, q_indptr: Buffer, new_k: Any, new_v: Any, kv_indptr: Buffer, *rest: Any) -> None:
        Out, Lse, scale = *rest[2:4], rest[-1]
        # Pages of float32 for each head, of one sequence at a time.
        pages_k = scratch((kv_n + PAGE - 1) // PAGE * (kv_heads * PAGE * dim))
        pages_v = scratch((kv_n + PAGE - 1) // PAGE * (kv_heads * PAGE * dim))
        with I.serial(0, batch) as b:
            keys = value(kv_indptr[b + 1] - kv_indptr[b])
            pages = value((keys + PAGE - 1) // PAGE)
            with I.parallel(0, pages * kv_heads) as index:
                h, page = value(index // pages), value(index % pages)
                with I.serial(0, I.min(keys - page * PAGE, PAGE)) as slot:
                    token = value(kv_indptr[b] + page * PAGE + slot)
                    base = value(index * (PAGE * dim))
                    _spread(shape, new_k, token, h, lambda d, x, lanes: _column(pages_k, base + slot, d, x, lanes))
                    _spread(shape, new_v, token, h, lambda d, x, lanes: store(pages_v, base + slot * dim + d, x, lanes))
            count = value(q_indptr[b + 1] - q_indptr[b])
            tasks = value((count + per_task - 1) // per_task)
            with I.parallel(0, tasks * kv_heads) as index:
                # Early and late queries in turn: a thread's share is contiguous, and late ones have more keys.
                i, h = value(index % tasks), value(index // tasks)
                start = value(I.Select(i % 2 == 0, i // 2, tasks - 1 - i // 2) * per_task)
                queries = value(I.min(per_task, count - start))
                task = _PrefillTask(shape, tiles, value(q_indptr[b] + start), queries, h)
                task.begin(Q, scale)

                def where(pages_: int, p: Expr, valid: Expr | None) -> Keys:
                    at = [value((h * pages + p + i) * (PAGE * dim)) for i in range(pages_)]
                    return Keys(pages_k, pages_v, at, at, valid=valid)

                def page(p: Expr) -> None:
                    valid = value(I.min(start + queries - p * PAGE, PAGE))
                    seen = lambda r: (0, I.min(start + r // group - p * PAGE, valid - 1))
                    task.state.attend(where(1, p, valid), seen, task.used)

                _walk(
                    0,
                    (start + queries + PAGE - 1) // PAGE,
                    lambda p: (p + BLOCK_PAGES) * PAGE <= start + 1,
                    lambda p: task.state.attend(where(BLOCK_PAGES, p, None), None, task.used),
                    page,
                )
                task.finish(Out, Lse)

    return function("ragged_prefill", arguments, body)


def _column(panel: Buffer, at: Expr, d: Expr, x: Expr, lanes: int) -> None:
    """panel[at + 16 d, at + 16 (d + 1), ...] = the lanes of x."""
    I.buffer_store(panel, x, [at + d * PAGE if lanes == 1 else I.ramp(at + d * PAGE, PAGE, lanes)])


def _spread(
    shape: AttentionShape,
    source: tuple[Buffer, Buffer | None],
    token: Expr,
    h: Expr,
    emit: Callable[[Expr, Expr, int], None],
) -> None:
    """emit(d, float32 values of dimensions d ... d + lanes - 1, lanes) for one head's K or V of one token."""
    elements, scales = source
    begin, first_scale = kv_row(shape, token)
    groups = max(1, shape.scale_groups)
    depth = shape.head_dim // groups
    with I.serial(0, groups) as g:
        scale = None if scales is None else value(I.cast(scales[first_scale + h * groups + g], "float32"))
        with I.serial(0, depth // shape.lanes) as j:
            d = value(g * depth + j * shape.lanes)
            item = load(elements, begin + h * shape.head_dim + d, shape.lanes)
            emit(d, item if scale is None else item * splat(scale, shape.lanes), shape.lanes)


@functools.cache
def kv_cache_functions(shape: AttentionShape, num_layers: int) -> dict[str, tirx.PrimFunc]:
    """Every function that `mlcpipe/nn/kv_cache.py` hands to TVM's cache, by its role there.

    TVM knows layers with a window and without one, and gives the former other length info. If `shape.all_slide`,
    those for layers without attend with the window all the same. Where TVM knows no layer with a window, there are
    no functions for them: they are the largest ones.
    """
    window = shape.sliding_window
    always = window if shape.all_slide else 0
    functions = {
        "append": append(shape),
        "prefill_chunk": prefill_chunk(shape, CHUNK),
        "prefill_cached": prefill_cached(shape, always, False, CACHED),
        "decode": decode(shape, always, False, DECODE),
        "merge": merge(shape),
        "split": split(shape),
        "copy_page": copy_page(shape),
        "read_back": read_back(shape, num_layers),
        "compact": compact(shape),
    }
    if window and not shape.all_slide:
        functions["prefill_cached_sliding"] = prefill_cached(shape, window, True, CACHED)
        functions["decode_sliding"] = decode(shape, window, True, DECODE)
    return by_hand(functions, "kv_cache_", **shape.facts)


def attention_tiles(op: Op, knobs: Mapping[str, int | str]) -> Tiles:
    """The tiles of a function of the cache: its own, but for what knobs say."""
    if "decode" in op.kind:
        names = {"accumulators": "attention_accumulators", "max_rows": "attention_rows"}
        return replace(DECODE, **_given(names | {"part_pages": "attention_pages"}, knobs))
    prompt = CHUNK if "chunk" in op.kind else CACHED
    tiles = replace(prompt, **_given({"max_rows": "attention_rows", "task_rows": "attention_task_rows"}, knobs))
    return replace(tiles, accumulators=tiles.max_rows * BLOCK_PAGES)


def _given(names: Mapping[str, str], knobs: Mapping[str, int | str]) -> dict[str, int]:
    return {field: int(knobs[name]) for field, name in names.items() if name in knobs}


def attention(func: tirx.PrimFunc, op: Op, knobs: Mapping[str, int | str]) -> tirx.PrimFunc:
    """A function of the cache with the tiles that knobs say; the one that there is where they say nothing."""
    tiles = attention_tiles(op, knobs)
    if tiles == attention_tiles(op, {}):
        return func
    shape = AttentionShape(**heads_of(op))
    if op.kind == "kv_cache_prefill_chunk":
        return prefill_chunk(shape, tiles)
    make = decode if "decode" in op.kind else prefill_cached
    return make(shape, *window_of(op), tiles)
