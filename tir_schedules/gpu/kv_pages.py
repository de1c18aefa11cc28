"""Pages of the KV cache on GPUs: what a page holds, how tokens get into it, and how pages are copied and merged.

TVM's cache object (tvm/src/runtime/vm/paged_kv_cache.cc) owns the pages and calls these functions. A page holds 16
tokens; of each KV head in it K lies transposed, [head_dim, 16], so that 16 neighbouring invocations read 16 keys that
are neighbours, then V, [16, head_dim].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.gpu.kernel import (
    Argument,
    Buffer,
    Expr,
    Tensor,
    ceildiv,
    f32,
    function,
    keep,
    launch,
    put,
)
from tir_schedules.paged import PAGE, Heads

_THREADS = 256


ACTIVATION_DTYPES = ("float32", "float16")


def kv_dtypes(activation_dtype: str) -> tuple[str, ...]:
    """How K and V can be kept: as the activations, because TVM's cache has one dtype for both and WGSL no bytes."""
    return (activation_dtype,)


@dataclass(frozen=True)
class AttentionShape(Heads):
    """Static facts of a model's attention. `dtype` is that of queries, outputs and the cache.

    `subgroup`: lanes of a subgroup, 0 where no size is known; `shuffled`: where `octets.Xs` says.
    """

    subgroup: int = 0
    shuffled: bool = False

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in one layer of the cache."""
        return 2 * self.num_kv_heads * self.head_dim * (2 if self.dtype == "float16" else 4)

    @property
    def cache_dtype(self) -> str:
        """The dtype that TVM's cache is told."""
        return self.dtype

    @property
    def cache_head_dim(self) -> int:
        return self.head_dim

    @property
    def cache_heads(self) -> int:
        return self.num_heads

    @property
    def cache_kv_heads(self) -> int:
        return self.num_kv_heads


@dataclass(frozen=True)
class Pages:
    """The pages, as one vector: [page, kv head, K or V, ...]."""

    shape: AttentionShape
    data: Buffer

    def _head(self, page: Expr, head: Expr) -> Expr:
        return (page * self.shape.num_kv_heads + head) * (2 * PAGE * self.shape.head_dim)

    def k(self, page: Expr, head: Expr, slot: Expr, d: Expr) -> Expr:
        """Index of an element of K."""
        return self._head(page, head) + d * PAGE + slot

    def v(self, page: Expr, head: Expr, slot: Expr, d: Expr) -> Expr:
        """Index of an element of V."""
        return self._head(page, head) + PAGE * self.shape.head_dim + slot * self.shape.head_dim + d


def pages_argument(shape: AttentionShape) -> Tensor:
    """TVM's [P, 2, kv_heads, 16, head_dim], to be seen through `flat_pages`."""
    count = tirx.Var("num_pages", "int64")
    return Tensor((count, 2, shape.num_kv_heads, PAGE, shape.head_dim), shape.dtype)


def flat_pages(shape: AttentionShape, buffer: Buffer) -> Pages:
    """The pages argument of a kernel."""
    size = 2 * shape.num_kv_heads * PAGE * shape.head_dim
    flat = I.decl_buffer((buffer.shape[0] * size,), shape.dtype, data=buffer.data)
    return Pages(shape, flat)


def heads_argument(shape: AttentionShape, rows: Expr) -> Tensor:
    """q or output [rows, num_heads, head_dim]."""
    return Tensor((rows, shape.num_heads, shape.head_dim), shape.dtype)


def kv_argument(shape: AttentionShape, *rows: Expr) -> Tensor:
    """k or v of new tokens [..., kv_heads, head_dim]."""
    return Tensor((*rows, shape.num_kv_heads, shape.head_dim), shape.dtype)


def sums_argument(shape: AttentionShape, rows: Expr) -> Tensor:
    """Log-sum-exps in base 2: f32[rows, num_heads]."""
    return Tensor((rows, shape.num_heads), "float32")


def index_argument(*dims: Expr) -> Tensor:
    """Indices or positions: TVM sends all of them in one buffer."""
    return Tensor(dims, "int32", offset=True)


def _each(count: Expr, body: Callable[[Expr], None]) -> None:
    """body(i) for i < count, an invocation each."""
    with launch(_THREADS, ceildiv(count, _THREADS)) as (bx, _, tx):
        i = keep(bx * _THREADS + tx)
        with I.If(i < I.cast(count, "int32")), I.Then():
            body(i)


def split(shape: AttentionShape) -> tirx.PrimFunc:
    """qkv [n, heads + 2 kv_heads, D] to q [n, heads, D] and k, v [n, kv_heads, D].

    RoPE is in the graph (nn/rope.py), so `apply_rope` is always 0.
    """
    heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    row = (heads + 2 * kv_heads) * dim
    n = tirx.Var("n", "int64")
    arguments: dict[str, Argument] = {
        "qkv": Tensor((n, heads + 2 * kv_heads, dim), shape.dtype),
        "position_map": index_argument(n),
        "q": heads_argument(shape, n),
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

        _each(n * row, element)

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

        _each(n * row, element)

    return function("kv_cache_append", arguments, body)


def merge(shape: AttentionShape) -> tirx.PrimFunc:
    """(v, s) <- softmax-weighted union of (v, s) and (v_other, s_other), s f32[n, heads] in base 2.

    Two kernels: the values of all dimensions need the sums as they were.
    """
    heads, dim = shape.num_heads, shape.head_dim
    n = tirx.Var("n", "int64")
    v, s = heads_argument(shape, n), sums_argument(shape, n)
    arguments: dict[str, Argument] = {"v": v, "s": s, "v_other": v, "s_other": s}

    def body(mine: Buffer, sums: Buffer, other: Buffer, other_sums: Buffer) -> None:
        def shares(t: Expr, head: Expr) -> tuple[Expr, Expr, Expr]:
            a, b = keep(sums[t, head]), keep(other_sums[t, head])
            top = keep(I.max(a, b))
            return top, keep(I.exp2(a - top)), keep(I.exp2(b - top))

        def values(i: Expr) -> None:
            t, head, d = keep(i // (heads * dim)), keep(i // dim % heads), keep(i % dim)
            _, a, b = shares(t, head)
            put(mine, (t, head, d), (f32(mine[t, head, d]) * a + f32(other[t, head, d]) * b) / (a + b))

        def total(i: Expr) -> None:
            t, head = keep(i // heads), keep(i % heads)
            top, a, b = shares(t, head)
            put(sums, (t, head), top + I.log2(a + b))

        _each(n * (heads * dim), values)
        _each(n * heads, total)

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
        _each(size, lambda i: put(data, end + i, data[begin + i]))

    return function("kv_cache_copy_page", arguments, body)


def compact(shape: AttentionShape) -> tirx.PrimFunc:
    """Move tokens inside a sequence after a token tree was pruned: copy_indptr[B+1], copy_pairs [2, n] (from, to).

    Moves of a sequence follow one another: a slot may be target of one and source of the next.
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

        _each(count * row, element)

    return function("kv_cache_compact", arguments, body)


def read_back(shape: AttentionShape, num_layers: int) -> tirx.PrimFunc:
    """K and V of one layer at the given slots, for `debug_get_kv`: [layers, n, kv_heads, D]."""
    dim, row = shape.head_dim, shape.num_kv_heads * shape.head_dim
    n = tirx.Var("n", "int64")
    found = kv_argument(shape, num_layers, n)
    arguments: dict[str, Argument] = {
        "pages": pages_argument(shape),
        "position_map": index_argument(n),
        "k": found,
        "v": found,
        "layer": "int64",
    }

    def body(paged: Buffer, position_map: Buffer, k: Buffer, v: Buffer, layer: Expr) -> None:
        pages, which = flat_pages(shape, paged), I.cast(layer, "int32")

        def element(i: Expr) -> None:
            t, head, d = keep(i // row), keep(i % row // dim), keep(i % dim)
            page, slot = keep(position_map[t] // PAGE), keep(position_map[t] % PAGE)
            put(k, (which, t, head, d), pages.data[pages.k(page, head, slot, d)])
            put(v, (which, t, head, d), pages.data[pages.v(page, head, slot, d)])

        _each(n * row, element)

    return function("kv_cache_read_back", arguments, body)
