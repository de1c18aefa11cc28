"""Paged attention of many queries (prefill): over cached pages, and over the chunk that the queries are in."""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr, function
from tir_schedules.gpu.attention import prefill_plain
from tir_schedules.gpu.attention.pages import (
    AttentionShape,
    Row,
    cache_heads_argument,
    flat_pages,
    index_argument,
    kv_argument,
)
from tir_schedules.gpu.attention.prefill_keys import PagedKeys, attend_pages
from tir_schedules.gpu.attention.prefill_plain import Operands
from tir_schedules.gpu.attention.prefill_tile import PrefillTile, Tile, for_tile
from tir_schedules.gpu.attention.scores import Cached, cached_arguments, results
from tir_schedules.gpu.kernel import keep


def prefill_cached(
    shape: AttentionShape, window: int, sliding_info: bool, size: PrefillTile = PrefillTile()
) -> tirx.PrimFunc:
    """Queries of the current chunk against the pages of tokens before it: q and output [n, heads, D].

    Sequence b has rows q_indptr[b]:q_indptr[b+1]. All cached keys precede the chunk, so only the window masks."""
    batch, n = tirx.Var("batch", "int32"), tirx.Var("n", "int32")
    arguments = {
        "q": cache_heads_argument(shape, n),
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

            def seen(query: Expr, token: Expr) -> Expr:
                return token >= oldest(I.min(query, tile.queries - 1)) if window else token >= 0

            paged = PagedKeys(tile.h, pages, cached.table(tile.b), begin, end)
            attend_pages(tile, paged, seen, q, out, lse, scale)

        for_tile(shape, size, batch, q_indptr, n, attend)

    return function("paged_prefill", arguments, body)


def prefill_chunk(shape: AttentionShape, size: PrefillTile = PrefillTile()) -> tirx.PrimFunc:
    """Causal attention of the current chunk with itself (TVM's "ragged" prefill): q and output [n, heads, D].

    The chunk is never longer than the sliding window (compiler/export.py caps it), so the window cannot mask.
    """
    dim, kv_heads = shape.head_dim, shape.num_kv_heads
    batch, n, kv_n = (tirx.Var(name, "int32") for name in ("batch", "n", "kv_n"))
    arguments = {
        "q": cache_heads_argument(shape, n),
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

            def at(x: Buffer) -> Callable[[Expr], Row]:
                return lambda token: Row(shape, x, keep(((first + token) * kv_heads + tile.h) * dim))

            end = keep(I.min(count, before + tile.last_query + 1))
            seen = lambda query, token: token <= before + query  # noqa: E731
            prefill_plain.attend(tile, prefill_plain.Keys(0, end, at(k), at(v), seen), Operands(q, out, lse, scale))

        for_tile(shape, size, batch, q_indptr, n, attend)

    return function("ragged_prefill", arguments, body)
