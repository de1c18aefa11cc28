"""Paged attention for GPUs: decode, prefill over cached pages, prefill over the current chunk.

The functions have the calling convention that TVM's `vm.builtin.paged_attention_kv_cache_create` expects
(tvm/src/runtime/vm/paged_kv_cache.cc, attn_backend.h); `kv_pages.py` says what pages, queries and outputs hold.
Scores are in base 2: log2(e) is part of the scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.gpu.kernel import (
    LOWEST,
    Argument,
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
from tir_schedules.gpu.kv_pages import (
    ACTIVATION_DTYPES,
    PAGE,
    AttentionShape,
    Pages,
    append,
    compact,
    copy_page,
    flat_pages,
    heads_argument,
    index_argument,
    kv_argument,
    kv_dtypes,
    merge,
    pages_argument,
    read_back,
    split,
    sums_argument,
)
from tir_schedules.op import tag

__all__ = ["ACTIVATION_DTYPES", "PAGE", "AttentionShape", "kv_cache_functions", "kv_dtypes"]

_LOG2E = math.log2(math.e)
# Keys of one part of a sequence in decode: a workgroup each, merged by a second kernel.
_PART = 128
_DECODE_THREADS = 64
# Prefill: a workgroup has a tile of rows (queries times heads of a group) and walks over blocks of keys.
_PREFILL_THREADS = 64
_KEYS = 16
_TILE = 4


def _score(shape: AttentionShape, dot: Expr, scale: Expr) -> Expr:
    """Scaled, capped score in base 2."""
    if not shape.softcap:
        return dot * (scale * I.float32(_LOG2E))
    return I.tanh(dot * scale / I.float32(shape.softcap)) * I.float32(shape.softcap * _LOG2E)


@dataclass(frozen=True)
class _Cached:
    """The arguments that say where the cached keys of each sequence are."""

    sliding_info: bool
    pages: Pages
    indptr: Buffer
    indices: Buffer
    length: Buffer
    k_position: Buffer
    q_position: Buffer

    def keys(self, b: Expr) -> Expr:
        """Cached tokens of sequence b."""
        last = self.length[0, b] if self.sliding_info else self.length[b]
        count = keep(self.indptr[b + 1] - self.indptr[b])
        return keep(I.if_then_else(count > 0, (count - 1) * PAGE + last, 0))

    def page(self, b: Expr, i: Expr) -> Expr:
        """The page of tokens 16 i ... 16 i + 15 of sequence b."""
        return self.indices[self.indptr[b] + i]

    def oldest(self, b: Expr, row: Expr, window: int) -> Expr:
        """The first key of sequence b that the query `row` sees."""
        return keep(I.max(self.q_position[row] - self.k_position[b] - (window - 1), 0))


def _cached_arguments(shape: AttentionShape, batch: Expr, queries: Expr, sliding_info: bool) -> dict[str, Argument]:
    return {
        "pages": pages_argument(shape),
        "indptr": index_argument(batch + 1),
        "indices": index_argument(tirx.Var("used_pages", "int32")),
        "length": index_argument(3, batch) if sliding_info else index_argument(batch),
        "k_position": index_argument(batch),
        "q_position": index_argument(queries),
    }


def _results(shape: AttentionShape, rows: Expr, causal: bool = False) -> dict[str, Argument]:
    """Outputs, and TVM's numbers at the end, of which only the last matters: positions are in the queries already."""
    numbers: dict[str, Argument] = {
        "rotary_mode": "int32",
        "rope_scale": "float32",
        "rope_theta": "float32",
        "sm_scale": "float32",
    }
    outputs: dict[str, Argument] = {"output": heads_argument(shape, rows), "lse": sums_argument(shape, rows)}
    return outputs | ({"causal": "int32"} if causal else {}) | numbers


def decode(shape: AttentionShape, window: int, sliding_info: bool) -> tirx.PrimFunc:
    """One query a sequence against its pages: q and output [B, heads, D], lse f32[B, heads] in base 2.

    A workgroup has a part of the keys of one KV head, with all query heads of its group; the parts are merged
    (Dao et al. 2023, "Flash-Decoding for long-context inference").
    """
    heads, dim = shape.num_heads, shape.head_dim
    batch = tirx.Var("batch", "int32")
    arguments = {
        "q": heads_argument(shape, batch),
        **_cached_arguments(shape, batch, batch, sliding_info),
        **_results(shape, batch),
    }

    def body(q: Buffer, paged: Buffer, indptr: Buffer, indices: Buffer, *rest: Buffer) -> None:
        length, k_position, q_position, out, lse = rest[:5]
        scale = rest[-1]
        cached = _Cached(sliding_info, flat_pages(shape, paged), indptr, indices, length, k_position, q_position)
        parts = ceildiv(indices.shape[0], _PART // PAGE)
        groups = batch * shape.num_kv_heads

        def finish(b: Expr, head: Expr, top: Expr, total: Expr) -> None:
            put(lse, (b, head), top + I.log2(I.max(total, I.float32(1e-37))))

        def in_one() -> None:
            with launch(_DECODE_THREADS, groups) as (bx, _, tx):
                task = _DecodePart(shape, cached, window, bx, 0, tx)
                task.run(q, scale, lambda b, head, d, sum_: put(out, (b, head, d), sum_ / task.whole(head)), finish)

        def in_parts() -> None:
            values = workspace((parts * batch * heads * dim,), "float32")
            sums = workspace((parts * batch * heads * 2,), "float32")
            with launch(_DECODE_THREADS, groups, parts) as (bx, by, tx):

                def at(b: Expr, head: Expr) -> Expr:
                    return (by * batch + b) * heads + head

                def keep_sums(b: Expr, head: Expr, top: Expr, total: Expr) -> None:
                    put(sums, at(b, head) * 2, top)
                    put(sums, at(b, head) * 2 + 1, total)

                task = _DecodePart(shape, cached, window, bx, by, tx)
                task.run(q, scale, lambda b, head, d, sum_: put(values, at(b, head) * dim + d, sum_), keep_sums)
            _merge_parts(shape, batch, parts, values, sums, out, lse)

        with I.If(parts <= 1):
            with I.Then():
                in_one()
            with I.Else():
                in_parts()

    return function("paged_decode", arguments, body)


class _DecodePart:
    """The scores of a part of the keys for the heads of one group, their weights, and the weighted values."""

    def __init__(self, shape: AttentionShape, cached: _Cached, window: int, index: Expr, part: Expr, tx: Expr) -> None:
        self.shape, self.cached, self.tx = shape, cached, tx
        self.b, self.h = keep(index // shape.num_kv_heads), keep(index % shape.num_kv_heads)
        keys = cached.keys(self.b)
        self.begin = keep(part * _PART)
        self.count = keep(I.max(I.min(keys - self.begin, _PART), 0))
        self.oldest = cached.oldest(self.b, self.b, window) if window else None
        self.scores = shared(shape.group * _PART)
        self.totals = shared(2 * shape.group)

    def whole(self, head: Expr) -> Expr:
        """The sum of weights of a head, at least a tiny number."""
        return I.max(self.totals[2 * (head % self.shape.group) + 1], I.float32(1e-37))

    def run(
        self,
        q: Buffer,
        scale: Expr,
        store: Callable[[Expr, Expr, Expr, Expr], None],
        finish: Callable[[Expr, Expr, Expr, Expr], None],
    ) -> None:
        """store(b, head, d, sum of weighted values), finish(b, head, largest score, sum of weights)."""
        self._scores(q, scale)
        self._weights(finish)
        self._values(store)

    def _scores(self, q: Buffer, scale: Expr) -> None:
        group, dim, threads, tx = self.shape.group, self.shape.head_dim, _DECODE_THREADS, self.tx
        dots = local(group)
        with I.serial(0, ceildiv(self.count, threads)) as i:
            t = keep(i * threads + tx)
            with I.If(t < self.count), I.Then():
                for g in range(group):
                    put(dots, g, 0.0)
                token = keep(self.begin + t)
                page = keep(self.cached.page(self.b, token // PAGE))
                first = keep(self.cached.pages.k(page, self.h, token % PAGE, 0))
                with I.serial(0, dim) as d:
                    k = keep(f32(self.cached.pages.data[first + d * PAGE]))
                    for g in range(group):
                        add(dots, g, k * f32(q[self.b, self.h * group + g, d]))
                for g in range(group):
                    score = _score(self.shape, dots[g], scale)
                    if self.oldest is not None:
                        score = I.if_then_else(token >= self.oldest, score, I.float32(LOWEST))
                    put(self.scores, g * _PART + t, score)
        barrier()

    def _weights(self, finish: Callable[[Expr, Expr, Expr, Expr], None]) -> None:
        """Scores become weights; a row of 16 invocations takes each head, in turns."""
        group, tx = self.shape.group, self.tx
        lanes, rows = 16, _DECODE_THREADS // 16
        partial, best, total = shared(_DECODE_THREADS), local(1), local(1)
        lane, row = keep(tx % lanes), keep(tx // lanes)
        for turn in range(-(-group // rows)):
            g = keep(I.min(turn * rows + row, group - 1))
            put(best, 0, LOWEST)
            with I.serial(0, ceildiv(self.count, lanes)) as i, I.If(i * lanes + lane < self.count), I.Then():
                put(best, 0, I.max(best[0], self.scores[g * _PART + i * lanes + lane]))
            put(partial, tx, best[0])
            barrier()
            for other in range(lanes):
                put(best, 0, I.max(best[0], partial[row * lanes + other]))
            put(total, 0, 0.0)
            mine = turn * rows + row < group
            with I.If(mine), I.Then(), I.serial(0, ceildiv(self.count, lanes)) as i:
                at = keep(g * _PART + i * lanes + lane)
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

    def _values(self, store: Callable[[Expr, Expr, Expr, Expr], None]) -> None:
        group, dim, threads, tx = self.shape.group, self.shape.head_dim, _DECODE_THREADS, self.tx
        sums = local(group)
        with I.serial(0, ceildiv(dim, threads)) as i:
            d = keep(i * threads + tx)
            with I.If(d < dim), I.Then():
                for g in range(group):
                    put(sums, g, 0.0)
                with I.serial(0, self.count) as t:
                    token = keep(self.begin + t)
                    page = keep(self.cached.page(self.b, token // PAGE))
                    v = keep(f32(self.cached.pages.data[self.cached.pages.v(page, self.h, token % PAGE, d)]))
                    for g in range(group):
                        add(sums, g, v * self.scores[g * _PART + t])
                for g in range(group):
                    store(self.b, self.h * group + g, d, sums[g])


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


@dataclass(frozen=True)
class _Keys:
    """What a tile of prefill attends to: tokens begin ... end - 1 of a sequence.

    `k(token)` and `v(token)` give the index of an element by its dimension, `seen(query, token)` says which queries
    (counted in the sequence's chunk) see a token.
    """

    begin: Expr
    end: Expr
    k: Callable[[Expr], Callable[[Expr], Expr]]
    v: Callable[[Expr], Callable[[Expr], Expr]]
    seen: Callable[[Expr, Expr], Expr]


@dataclass(frozen=True)
class _Tile:
    """Rows of prefill: `row0` is the first of (query, head of the group) in sequence `b`, for KV head `h`.

    Where `exists` is false the workgroup is one too many, and has no row; it cannot return, because of the barriers.
    """

    shape: AttentionShape
    b: Expr
    h: Expr
    row0: Expr
    first: Expr
    queries: Expr
    exists: Expr
    tx: Expr

    @property
    def rows(self) -> int:
        return _prefill_rows(self.shape)

    @property
    def lanes(self) -> int:
        """Invocations that share four rows."""
        return _PREFILL_THREADS // (self.rows // _TILE)

    def query(self, r: Expr) -> Expr:
        """The query of row r, counted in the sequence's chunk."""
        return (self.row0 + r) // self.shape.group

    @property
    def last_query(self) -> Expr:
        """The last query of the tile."""
        return I.min(self.query(self.rows - 1), self.queries - 1)

    def head(self, r: Expr) -> Expr:
        return self.h * self.shape.group + (self.row0 + r) % self.shape.group

    def inside(self, r: Expr) -> Expr:
        return I.And(self.exists, self.row0 + r < self.queries * self.shape.group)


def _prefill_rows(shape: AttentionShape) -> int:
    """Rows of a tile."""
    return 16


def _for_tile(shape: AttentionShape, batch: Expr, q_indptr: Buffer, n: Expr, body: Callable[[_Tile], None]) -> None:
    """body(tile) in a workgroup for every tile of every sequence and KV head.

    Lengths are known to the device only, so there are as many workgroups as there can be tiles.
    """
    rows = _prefill_rows(shape)
    with launch(_PREFILL_THREADS, ceildiv(n * shape.group, rows) + batch, shape.num_kv_heads) as (bx, h, tx):
        left, found = local(1, "int32"), local(1, "int32")
        put(left, 0, bx)
        put(found, 0, -1)
        with I.serial(0, batch) as b, I.If(found[0] < 0), I.Then():
            tiles = keep(ceildiv((q_indptr[b + 1] - q_indptr[b]) * shape.group, rows))
            with I.If(left[0] < tiles):
                with I.Then():
                    put(found, 0, b)
                with I.Else():
                    put(left, 0, left[0] - tiles)
        exists = keep(found[0] >= 0)
        b = keep(I.max(found[0], 0))
        first = keep(q_indptr[b])
        body(_Tile(shape, b, h, keep(left[0] * rows), first, keep(q_indptr[b + 1] - first), exists, tx))


def _attend(tile: _Tile, keys: _Keys, q: Buffer, k: Buffer, v: Buffer, out: Buffer, lse: Buffer, scale: Expr) -> None:
    """out = weighted mean of the values that each row sees, lse = log2 of its sum of 2**score."""
    rows, dim, lanes, tx = tile.rows, tile.shape.head_dim, tile.lanes, tile.tx
    scores = shared(rows * _KEYS)
    top, whole, shrink = shared(rows), shared(rows), shared(rows)
    columns = -(-dim // lanes)
    sums = local(_TILE * columns)
    lane, row = keep(tx % lanes), keep(tx // lanes * _TILE)
    with I.If(tx < rows), I.Then():
        put(top, tx, LOWEST)
        put(whole, tx, 0.0)
    for i in range(_TILE * columns):
        put(sums, i, 0.0)
    blocks = keep(I.if_then_else(tile.exists, ceildiv(I.max(keys.end - keys.begin, 0), _KEYS), 0))
    with I.serial(0, blocks) as block:
        token0 = keep(keys.begin + block * _KEYS)
        barrier()
        _tile_scores(tile, keys, q, k, scores, scale, token0, lane, row)
        barrier()
        _tile_weights(tile, scores, top, whole, shrink)
        barrier()
        for i in range(_TILE):
            factor = keep(shrink[row + i])
            for c in range(columns):
                put(sums, i * columns + c, sums[i * columns + c] * factor)
        with I.serial(0, I.min(keys.end - token0, _KEYS)) as t:
            at = keys.v(token0 + t)
            weights = [keep(scores[(row + i) * _KEYS + t]) for i in range(_TILE)]
            for c in range(columns):
                d = lane + c * lanes if dim % lanes == 0 else I.min(lane + c * lanes, dim - 1)
                value = keep(f32(v[at(d)]))
                for i in range(_TILE):
                    add(sums, i * columns + c, weights[i] * value)
    barrier()
    for i in range(_TILE):
        with I.If(tile.inside(row + i)), I.Then():
            target, head = keep(tile.first + tile.query(row + i)), keep(tile.head(row + i))
            total = keep(I.max(whole[row + i], I.float32(1e-37)))
            for c in range(columns):
                d = lane + c * lanes
                if dim % lanes == 0:
                    put(out, (target, head, d), sums[i * columns + c] / total)
                else:
                    with I.If(d < dim), I.Then():
                        put(out, (target, head, d), sums[i * columns + c] / total)
            with I.If(lane == 0), I.Then():
                put(lse, (target, head), top[row + i] + I.log2(total))


def _tile_scores(
    tile: _Tile,
    keys: _Keys,
    q: Buffer,
    k: Buffer,
    scores: Buffer,
    scale: Expr,
    token0: Expr,
    lane: Expr,
    row: Expr,
) -> None:
    """scores[row, key] of a block of keys; LOWEST where a row does not see a key."""
    dim, lanes = tile.shape.head_dim, tile.lanes
    count = _KEYS // lanes
    dots = local(_TILE * count)
    tokens = [keep(token0 + lane + lanes * j) for j in range(count)]
    at = [keys.k(I.min(token, keys.end - 1)) for token in tokens]
    lines = [
        (keep(tile.first + I.max(I.min(tile.query(row + i), tile.queries - 1), 0)), keep(tile.head(row + i)))
        for i in range(_TILE)
    ]
    for i in range(_TILE * count):
        put(dots, i, 0.0)
    with I.serial(0, dim) as d:
        a = [keep(f32(q[line, head, d])) for line, head in lines]
        b = [keep(f32(k[index(d)])) for index in at]
        for i in range(_TILE):
            for j in range(count):
                add(dots, i * count + j, a[i] * b[j])
    for i in range(_TILE):
        for j in range(count):
            seen = I.And(tokens[j] < keys.end, keys.seen(tile.query(row + i), tokens[j]))
            score = I.if_then_else(seen, _score(tile.shape, dots[i * count + j], scale), I.float32(LOWEST))
            put(scores, (row + i) * _KEYS + lane + lanes * j, score)


def _tile_weights(tile: _Tile, scores: Buffer, top: Buffer, whole: Buffer, shrink: Buffer) -> None:
    """Scores become weights relative to the new largest score of each row."""
    tx, best, total = tile.tx, local(1), local(1)
    with I.If(tx < tile.rows), I.Then():
        put(best, 0, top[tx])
        with I.serial(0, _KEYS) as t:
            put(best, 0, I.max(best[0], scores[tx * _KEYS + t]))
        put(total, 0, 0.0)
        with I.serial(0, _KEYS) as t:
            score = keep(scores[tx * _KEYS + t])
            weight = keep(I.if_then_else(score > I.float32(LOWEST), I.exp2(score - best[0]), I.float32(0)))
            put(scores, tx * _KEYS + t, weight)
            add(total, 0, weight)
        factor = keep(I.exp2(top[tx] - best[0]))
        put(shrink, tx, factor)
        put(whole, tx, whole[tx] * factor + total[0])
        put(top, tx, best[0])


def prefill_cached(shape: AttentionShape, window: int, sliding_info: bool) -> tirx.PrimFunc:
    """Queries of the current chunk against the pages of tokens before it: q and output [n, heads, D].

    Sequence b has rows q_indptr[b]:q_indptr[b+1]. All cached keys precede the chunk, so only the window masks.
    """
    batch, n = tirx.Var("batch", "int32"), tirx.Var("n", "int32")
    arguments = {
        "q": heads_argument(shape, n),
        "q_indptr": index_argument(batch + 1),
        **_cached_arguments(shape, batch, n, sliding_info),
        **_results(shape, n, causal=True),
    }

    def body(q: Buffer, q_indptr: Buffer, paged: Buffer, *rest: Buffer) -> None:
        out, lse, scale = rest[5], rest[6], rest[-1]
        pages = flat_pages(shape, paged)
        cached = _Cached(sliding_info, pages, *rest[:5])

        def attend(tile: _Tile) -> None:
            end = cached.keys(tile.b)
            oldest = lambda query: cached.oldest(tile.b, tile.first + query, window)  # noqa: E731
            begin = keep(I.min(oldest(tile.query(0)), end)) if window else 0

            def at(index: Callable[..., Expr], token: Expr) -> Callable[[Expr], Expr]:
                page = keep(cached.page(tile.b, token // PAGE))
                slot = keep(token % PAGE)
                return lambda d: index(page, tile.h, slot, d)

            def seen(query: Expr, token: Expr) -> Expr:
                return token >= oldest(I.min(query, tile.queries - 1)) if window else token >= 0

            keys = _Keys(begin, end, lambda t: at(pages.k, t), lambda t: at(pages.v, t), seen)
            _attend(tile, keys, q, pages.data, pages.data, out, lse, scale)

        _for_tile(shape, batch, q_indptr, n, attend)

    return function("paged_prefill", arguments, body)


def prefill_chunk(shape: AttentionShape) -> tirx.PrimFunc:
    """Causal attention of the current chunk with itself (TVM's "ragged" prefill): q and output [n, heads, D].

    The chunk is never longer than the sliding window (compiler/export.py caps it), so the window cannot mask.
    """
    dim, kv_heads = shape.head_dim, shape.num_kv_heads
    batch, n, kv_n = (tirx.Var(name, "int32") for name in ("batch", "n", "kv_n"))
    arguments = {
        "q": heads_argument(shape, n),
        "q_indptr": index_argument(batch + 1),
        "k": kv_argument(shape, kv_n),
        "v": kv_argument(shape, kv_n),
        "kv_indptr": index_argument(batch + 1),
        "q_position": index_argument(n),
        "k_position": index_argument(batch),
        **_results(shape, n, causal=True),
    }

    def body(q: Buffer, q_indptr: Buffer, new_k: Buffer, new_v: Buffer, kv_indptr: Buffer, *rest: Buffer) -> None:
        out, lse, scale = rest[2], rest[3], rest[-1]
        k, v = (I.decl_buffer((kv_n * kv_heads * dim,), shape.dtype, data=x.data) for x in (new_k, new_v))

        def attend(tile: _Tile) -> None:
            first = keep(kv_indptr[tile.b])
            count = keep(kv_indptr[tile.b + 1] - first)
            before = keep(count - tile.queries)

            def at(token: Expr) -> Callable[[Expr], Expr]:
                base = keep(((first + token) * kv_heads + tile.h) * dim)
                return lambda d: base + d

            end = keep(I.min(count, before + tile.last_query + 1))
            keys = _Keys(0, end, at, at, lambda query, token: token <= before + query)
            _attend(tile, keys, q, k, v, out, lse, scale)

        _for_tile(shape, batch, q_indptr, n, attend)

    return function("ragged_prefill", arguments, body)


def kv_cache_functions(shape: AttentionShape, num_layers: int) -> dict[str, tirx.PrimFunc]:
    """Every function that `mlcpipe/nn/kv_cache.py` hands to TVM's cache, by its role there.

    TVM knows layers with a window and without one, and gives the former other length info. If `shape.all_slide`,
    those for layers without attend with the window all the same.
    """
    window = shape.sliding_window
    always = window if shape.all_slide else 0
    functions = {
        "append": append(shape),
        "prefill_chunk": prefill_chunk(shape),
        "prefill_cached": prefill_cached(shape, always, False),
        "decode": decode(shape, always, False),
        "merge": merge(shape),
        "split": split(shape),
        "copy_page": copy_page(shape),
        "read_back": read_back(shape, num_layers),
        "compact": compact(shape),
    }
    if window:
        functions["prefill_cached_sliding"] = prefill_cached(shape, window, True)
        functions["decode_sliding"] = decode(shape, window, True)
    tagged = {
        name: tag(func, f"kv_cache_{name}").with_attr("tirx.is_scheduled", True) for name, func in functions.items()
    }
    # Without windows those for sliding layers are never called, and a kernel less is a shader less to compile.
    return {f"{name}_sliding": tagged[name] for name in ("prefill_cached", "decode")} | tagged
