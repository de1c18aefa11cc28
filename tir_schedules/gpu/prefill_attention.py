"""Paged attention of many queries (prefill): over cached pages, and over the chunk that they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.gpu import device_calls, mma_attention
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
    local,
    pin,
    put,
    shared,
)
from tir_schedules.gpu.kv_pages import AttentionShape, Pages, flat_pages, heads_argument, index_argument, kv_argument
from tir_schedules.gpu.octets import neighbours
from tir_schedules.gpu.prefill_tile import PrefillTile, Tile, for_tile, prefill_tile
from tir_schedules.gpu.scores import Cached, cached_arguments, results, score_of
from tir_schedules.paged import PAGE

__all__ = ["PrefillTile", "prefill_cached", "prefill_chunk", "prefill_tile"]

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


def _attend(tile: Tile, keys: _Keys, q: Buffer, k: Buffer, v: Buffer, out: Buffer, lse: Buffer, scale: Expr) -> None:
    """out = weighted mean of the values that each row sees, lse = log2 of its sum of 2**score."""
    rows, dim, lanes, tx = tile.rows, tile.shape.head_dim, tile.lanes, tile.tx
    tall, size = tile.size.tall, tile.size.keys
    scores = shared(rows * size)
    top, whole, shrink = shared(rows), shared(rows), shared(rows)
    columns = -(-dim // lanes)
    sums = local(tall * columns)
    lane, row = keep(tx % lanes), keep(tx // lanes * tall)
    def nothing(r: Expr) -> None:
        put(top, r, LOWEST)
        put(whole, r, 0.0)

    tile.each_row(nothing)
    for i in range(tall * columns):
        put(sums, i, 0.0)
    blocks = keep(I.if_then_else(tile.exists, ceildiv(I.max(keys.end - keys.begin, 0), size), 0))
    with I.serial(0, blocks) as block:
        token0 = keep(keys.begin + block * size)
        barrier()
        _tile_scores(tile, keys, q, k, scores, scale, token0, lane, row)
        barrier()
        _tile_weights(tile, scores, top, whole, shrink)
        barrier()
        for i in range(tall):
            factor = keep(shrink[row + i])
            for c in range(columns):
                put(sums, i * columns + c, sums[i * columns + c] * factor)
        with I.serial(0, I.min(keys.end - token0, size)) as t:
            at = keys.v(token0 + t)
            weights = [keep(scores[(row + i) * size + t]) for i in range(tall)]
            for c in range(columns):
                d = lane + c * lanes if dim % lanes == 0 else I.min(lane + c * lanes, dim - 1)
                value = keep(f32(v[at(d)]))
                for i in range(tall):
                    add(sums, i * columns + c, weights[i] * value)
    barrier()
    for i in range(tall):
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
    tile: Tile,
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
    dim, lanes, tall, size = tile.shape.head_dim, tile.lanes, tile.size.tall, tile.size.keys
    count = size // lanes
    dots = local(tall * count)
    tokens = [keep(token0 + lane + lanes * j) for j in range(count)]
    at = [keys.k(I.min(token, keys.end - 1)) for token in tokens]
    lines = [
        (keep(tile.first + I.max(I.min(tile.query(row + i), tile.queries - 1), 0)), keep(tile.head(row + i)))
        for i in range(tall)
    ]
    for i in range(tall * count):
        put(dots, i, 0.0)
    with I.serial(0, dim) as d:
        a = [keep(f32(q[line, head, d])) for line, head in lines]
        b = [keep(f32(k[index(d)])) for index in at]
        for i in range(tall):
            for j in range(count):
                add(dots, i * count + j, a[i] * b[j])
    for i in range(tall):
        for j in range(count):
            seen = I.And(tokens[j] < keys.end, keys.seen(tile.query(row + i), tokens[j]))
            score = I.if_then_else(seen, score_of(tile.shape, dots[i * count + j], scale), I.float32(LOWEST))
            put(scores, (row + i) * size + lane + lanes * j, score)


def _tile_weights(tile: Tile, scores: Buffer, top: Buffer, whole: Buffer, shrink: Buffer) -> None:
    """Scores become weights relative to the new largest score of each row."""
    size, best, total = tile.size.keys, local(1), local(1)

    def weigh(r: Expr) -> None:
        put(best, 0, top[r])
        with I.serial(0, size) as t:
            put(best, 0, I.max(best[0], scores[r * size + t]))
        put(total, 0, 0.0)
        with I.serial(0, size) as t:
            score = keep(scores[r * size + t])
            weight = keep(I.if_then_else(score > I.float32(LOWEST), I.exp2(score - best[0]), I.float32(0)))
            put(scores, r * size + t, weight)
            add(total, 0, weight)
        factor = keep(I.exp2(top[r] - best[0]))
        put(shrink, r, factor)
        put(whole, r, whole[r] * factor + total[0])
        put(top, r, best[0])

    tile.each_row(weigh)


def prefill_cached(
    shape: AttentionShape,
    window: int,
    sliding_info: bool,
    size: PrefillTile = PrefillTile(),
    products: bool = False,
) -> tirx.PrimFunc:
    """Queries of the current chunk against the pages of tokens before it: q and output [n, heads, D].

    Sequence b has rows q_indptr[b]:q_indptr[b+1]. All cached keys precede the chunk, so only the window masks.
    `products`: on matrix units, with `mma_attention.TILE`, which `mma_attention.fits` allows.
    """
    batch, n = tirx.Var("batch", "int32"), tirx.Var("n", "int32")
    arguments = {
        "q": heads_argument(shape, n),
        "q_indptr": index_argument(batch + 1),
        **cached_arguments(shape, batch, n, sliding_info),
        **results(shape, n, causal=True),
    }

    def body(q: Buffer, q_indptr: Buffer, paged: Buffer, *rest: Buffer) -> None:
        out, lse, scale = rest[5], rest[6], rest[-1]
        pages = flat_pages(shape, paged)
        cached = Cached(sliding_info, pages, *rest[:5])

        def attend(tile: Tile) -> None:
            end = cached.keys(tile.b)
            oldest = lambda query: cached.oldest(tile.b, tile.first + query, window)  # noqa: E731
            begin = keep(I.min(oldest(tile.query(0)), end)) if window else 0

            def at(index: Callable[..., Expr], token: Expr) -> Callable[[Expr], Expr]:
                page = keep(cached.page(tile.b, token // PAGE))
                slot = keep(token % PAGE)
                return lambda d: index(page, tile.h, slot, d)

            def seen(query: Expr, token: Expr) -> Expr:
                return token >= oldest(I.min(query, tile.queries - 1)) if window else token >= 0

            if products:
                mma_attention.attend(tile, _paged_keys(cached, tile, begin, end, seen), q, out, lse, scale, n)
                return
            keys = _Keys(begin, end, lambda t: at(pages.k, t), lambda t: at(pages.v, t), seen)
            _attend(tile, keys, q, pages.data, pages.data, out, lse, scale)

        for_tile(shape, size, batch, q_indptr, n, attend)

    return function("paged_prefill", arguments, body)


def _paged_keys(
    cached: Cached, tile: Tile, begin: Expr, end: Expr, seen: Callable[[Expr, Expr], Expr]
) -> mma_attention.Keys:
    """The keys of a tile in pages, from the beginning of one on."""
    pages: Pages = cached.pages
    words = I.decl_buffer((pages.data.shape[0] // 2,), "uint32", data=pages.data.data)

    def page_of(token: Expr) -> Expr:
        return keep(cached.page(tile.b, I.min(token, end - 1) // PAGE))

    def k(token0: Expr, step: Expr, g: Expr, t: Expr) -> list[list[Expr]]:
        first = keep((pages.k(page_of(token0), tile.h, 0, step * PAGE + t * 2)) // 2 + g)
        a, b, c, d = (pin(words[first + row * (PAGE // 2)]) for row in (0, 1, 8, 9))
        low, high = device_calls.low_halves, device_calls.high_halves
        return [[low(a, b), low(c, d), high(a, b), high(c, d)]]

    def v(token: Expr) -> Expr:
        return keep(pages.v(page_of(token), tile.h, token % PAGE, 0) // 2)

    return mma_attention.Keys(keep(begin // PAGE * PAGE), end, k, v, words, seen, pairs=True)


def _fresh_keys(
    shape: AttentionShape, tile: Tile, first: Expr, end: Expr, k: Buffer, v: Buffer, seen: Callable[[Expr, Expr], Expr]
) -> mma_attention.Keys:
    """Keys of a chunk: row `first` + token of k and v."""
    half, pairs = shape.head_dim // 2, bool(shape.head_dim % 32)
    k_words, v_words = (I.decl_buffer((x.shape[0] // 2,), "uint32", data=x.data) for x in (k, v))

    def row(token: Expr) -> Expr:
        return keep(((first + I.min(token, end - 1)) * shape.num_kv_heads + tile.h) * half)

    def of_key(token: Expr, step: Expr, t: Expr) -> list[Expr]:
        if not pairs:
            return neighbours(k_words, row(token) + step * 16 + t * 4, 4)
        return [pin(k_words[row(token) + step * 8 + t + i]) for i in (0, 4)]

    def of_two(token0: Expr, step: Expr, g: Expr, t: Expr) -> list[list[Expr]]:
        even, odd = (of_key(token0 + g * 2 + i, step, t) for i in range(2))
        return [[*even[i : i + 2], *odd[i : i + 2]] for i in range(0, len(even), 2)]

    return mma_attention.Keys(I.int32(0), end, of_two, row, v_words, seen, pairs)


def prefill_chunk(
    shape: AttentionShape, size: PrefillTile = PrefillTile(), products: bool = False
) -> tirx.PrimFunc:
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
        **results(shape, n, causal=True),
    }

    def body(q: Buffer, q_indptr: Buffer, new_k: Buffer, new_v: Buffer, kv_indptr: Buffer, *rest: Buffer) -> None:
        out, lse, scale = rest[2], rest[3], rest[-1]
        k, v = (I.decl_buffer((kv_n * kv_heads * dim,), shape.dtype, data=x.data) for x in (new_k, new_v))

        def attend(tile: Tile) -> None:
            first = keep(kv_indptr[tile.b])
            count = keep(kv_indptr[tile.b + 1] - first)
            before = keep(count - tile.queries)

            def at(token: Expr) -> Callable[[Expr], Expr]:
                base = keep(((first + token) * kv_heads + tile.h) * dim)
                return lambda d: base + d

            end = keep(I.min(count, before + tile.last_query + 1))
            seen = lambda query, token: token <= before + query  # noqa: E731
            if products:
                mma_attention.attend(tile, _fresh_keys(shape, tile, first, end, k, v, seen), q, out, lse, scale, n)
                return
            _attend(tile, _Keys(0, end, at, at, seen), q, k, v, out, lse, scale)

        for_tile(shape, size, batch, q_indptr, n, attend)

    return function("ragged_prefill", arguments, body)
