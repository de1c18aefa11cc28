"""The functions over tokens of TVM's cache object (tvm/src/runtime/vm/paged_kv_cache.cc): split, append, merge, copy,
compact, read back.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Argument, Buffer, Expr, Tensor, f32, function, put
from tir_schedules.gpu.attention.pages import (
    AttentionShape,
    cache_heads_argument,
    flat_pages,
    for_each,
    index_argument,
    kv_argument,
    pages_argument,
    sums_argument,
)
from tir_schedules.gpu.attention.scores import store_sum
from tir_schedules.gpu.kernel import keep
from tir_schedules.paged import PAGE


def split(shape: AttentionShape) -> tirx.PrimFunc:
    """qkv [n, heads + 2 kv_heads, D] to q [n, heads, D] and k, v [n, kv_heads, D]; `heads` with `sum_heads`.

    RoPE is in the graph (nn/rope.py), so `apply_rope` is always 0.
    """
    heads, kv_heads, dim = shape.num_heads + shape.sum_heads, shape.num_kv_heads, shape.head_dim
    row = (heads + 2 * kv_heads) * dim
    n = tirx.Var("n", "int64")
    arguments: dict[str, Argument] = {
        "qkv": Tensor((n, heads + 2 * kv_heads, dim), shape.dtype),
        "position_map": index_argument(n),
        "q": cache_heads_argument(shape, n),
        "k": kv_argument(shape, n),
        "v": kv_argument(shape, n),
        "apply_rope": "int64",
    }

    def body(qkv: Buffer, position_map: Buffer, q: Buffer, k: Buffer, v: Buffer, apply_rope: Expr) -> None:
        def element(i: Expr) -> None:
            t, head, d = keep(i // row), keep(i % row // dim), keep(i % dim)
            with I.If(head < heads):
                with I.Then():
                    put(q, (t, head, d), qkv[t, head, d])
                with I.Else(), I.If(head < heads + kv_heads):
                    with I.Then():
                        put(k, (t, head - heads, d), qkv[t, head, d])
                    with I.Else():
                        put(v, (t, head - heads - kv_heads, d), qkv[t, head, d])

        for_each(n * row, element)

    return function("kv_cache_split", arguments, body)


def append(shape: AttentionShape) -> tirx.PrimFunc:
    """Write k, v of new tokens to their slots; position_map[n] is page*16 + slot, or -1 to skip."""
    dim, row = shape.head_dim, shape.num_kv_heads * shape.head_dim
    n = tirx.Var("n", "int64")
    arguments: dict[str, Argument] = {
        "pages": pages_argument(shape),
        "k": kv_argument(shape, n),
        "v": kv_argument(shape, n),
        "position_map": index_argument(n),
    }

    def body(paged: Buffer, k: Buffer, v: Buffer, position_map: Buffer) -> None:
        pages = flat_pages(shape, paged)

        def element(i: Expr) -> None:
            t, head, d = keep(i // row), keep(i % row // dim), keep(i % dim)
            position = keep(position_map[t])
            with I.If(position >= 0), I.Then():
                page, slot = keep(position // PAGE), keep(position % PAGE)
                put(pages.data, pages.k(page, head, slot, d), k[t, head, d])
                put(pages.data, pages.v(page, head, slot, d), v[t, head, d])

        for_each(n * row, element)

    return function("kv_cache_append", arguments, body)


def merge(shape: AttentionShape) -> tirx.PrimFunc:
    """(v, s) <- softmax-weighted union of (v, s) and (v_other, s_other), s f32[n, heads] in base 2.

    Two kernels, because the values of all dimensions need the old sums.
    """
    heads, dim = shape.num_heads, shape.head_dim
    n = tirx.Var("n", "int64")
    v, s = cache_heads_argument(shape, n), sums_argument(shape, n)
    arguments: dict[str, Argument] = {"v": v, "s": s, "v_other": v, "s_other": s}

    def body(values: Buffer, sums: Buffer, other: Buffer, other_sums: Buffer) -> None:
        def shares(t: Expr, head: Expr) -> tuple[Expr, Expr, Expr]:
            a, b = keep(sums[t, head]), keep(other_sums[t, head])
            largest = keep(I.max(a, b))
            return largest, keep(I.exp2(a - largest)), keep(I.exp2(b - largest))

        def merge_value(i: Expr) -> None:
            t, head, d = keep(i // (heads * dim)), keep(i // dim % heads), keep(i % dim)
            _, a, b = shares(t, head)
            put(values, (t, head, d), (f32(values[t, head, d]) * a + f32(other[t, head, d]) * b) / (a + b))

        def merge_sum(i: Expr) -> None:
            t, head = keep(i // heads), keep(i % heads)
            largest, a, b = shares(t, head)
            store_sum(shape, values, sums, t, head, largest + I.log2(a + b))

        for_each(n * (heads * dim), merge_value)
        for_each(n * heads, merge_sum)

    return function("merge_state", arguments, body)


def copy_page(shape: AttentionShape) -> tirx.PrimFunc:
    """Copy page `source` to page `destination` (a fork inside a page); the first `length` tokens count."""
    size = 2 * shape.num_kv_heads * PAGE * shape.head_dim
    arguments: dict[str, Argument] = {
        "pages": pages_argument(shape),
        "source": "int64",
        "destination": "int64",
        "length": "int64",
    }

    def body(paged: Buffer, source: Expr, destination: Expr, length: Expr) -> None:
        data = flat_pages(shape, paged).data
        begin, end = I.cast(source, "int32") * size, I.cast(destination, "int32") * size
        for_each(size, lambda i: put(data, end + i, data[begin + i]))

    return function("kv_cache_copy_page", arguments, body)


def compact(shape: AttentionShape) -> tirx.PrimFunc:
    """Move tokens inside sequences after a token tree was pruned: indptr i32[B+1], pairs i32[2, n] (from, to).

    Moves of a sequence run one after another: a slot may be the target of one and the source of the next.
    """
    dim, row = shape.head_dim, shape.num_kv_heads * shape.head_dim
    entries, moves = tirx.Var("entries", "int32"), tirx.Var("moves", "int32")
    arguments: dict[str, Argument] = {
        "pages": pages_argument(shape),
        "indptr": index_argument(entries),
        "pairs": index_argument(2, moves),
        "batch": "int32",
    }

    def body(paged: Buffer, indptr: Buffer, pairs: Buffer, count: Expr) -> None:
        pages = flat_pages(shape, paged)

        def element(i: Expr) -> None:
            b, head, d = keep(i // row), keep(i % row // dim), keep(i % dim)
            with I.serial(0, indptr[b + 1] - indptr[b]) as move:
                a, z = keep(pairs[0, indptr[b] + move]), keep(pairs[1, indptr[b] + move])
                for at in (pages.k, pages.v):
                    put(pages.data, at(z // PAGE, head, z % PAGE, d), pages.data[at(a // PAGE, head, a % PAGE, d)])

        for_each(count * row, element)

    return function("kv_cache_compact", arguments, body)


def read_back(shape: AttentionShape, num_layers: int) -> tirx.PrimFunc:
    """K and V of one layer at the given slots, for `debug_get_kv`: [layers, n, kv_heads, D]."""
    dim, row = shape.head_dim, shape.num_kv_heads * shape.head_dim
    n = tirx.Var("n", "int64")
    output = kv_argument(shape, num_layers, n)
    arguments: dict[str, Argument] = {
        "pages": pages_argument(shape),
        "position_map": index_argument(n),
        "k": output,
        "v": output,
        "layer": "int64",
    }

    def body(paged: Buffer, position_map: Buffer, k: Buffer, v: Buffer, layer: Expr) -> None:
        pages, which = flat_pages(shape, paged), I.cast(layer, "int32")

        def element(i: Expr) -> None:
            t, head, d = keep(i // row), keep(i % row // dim), keep(i % dim)
            page, slot = keep(position_map[t] // PAGE), keep(position_map[t] % PAGE)
            put(k, (which, t, head, d), pages.data[pages.k(page, head, slot, d)])
            put(v, (which, t, head, d), pages.data[pages.v(page, head, slot, d)])

        for_each(n * row, element)

    return function("kv_cache_read_back", arguments, body)
