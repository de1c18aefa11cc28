"""Pages of the KV cache on CPUs: what a page holds, how tokens get into it, and how pages are copied and merged.

TVM's cache object (tvm/src/runtime/vm/paged_kv_cache.cc) owns the pages and calls these functions. It wants q, k, v,
output and pages of one dtype, so it is told of bytes: its heads and head dimension only say how many there are, and
every function here views them as what they are. Queries and outputs are float32.

A page holds 16 tokens; the bytes of one KV head in it are, one after another:
K transposed, [head_dim, 16], so that one vector load has the same dimension of 16 keys; V, [16, head_dim]; and for q8
the scales of K and of V, float16 [groups, 16] each.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.cpu.vectors import (
    Argument,
    Buffer,
    Expr,
    Tensor,
    exp2,
    function,
    lanes_of,
    put,
    read,
    splat,
    store,
    value,
)
from tir_schedules.paged import PAGE, Heads

Rows = tuple[Buffer, Buffer | None]  # elements and scales of new tokens' K or V

FORMATS = ("float32", "float16", "q8")
_ITEM_BYTES = {"float32": 4, "float16": 2, "q8": 1}
# From here on a second thread brings more than its start costs.
_MANY_TOKENS = 16


ACTIVATION_DTYPES = ("float32",)


def kv_dtypes(activation_dtype: str) -> tuple[str, ...]:
    """How K and V can be kept."""
    return FORMATS


@dataclass(frozen=True)
class AttentionShape(Heads):
    """Static facts of a model's attention.

    `dtype` is float32, float16 or q8: int8 codes c with one float16 scale s for each group of 32 dimensions of a
    token's K or V in a head (all of them, where head_dim is no multiple of 32), x ~ c s, s = max|x| / 127. Then
    |x - c s| <= 0.004 max|x| + 4e-6 for max|x| <= 8e6, the second term for scales that are subnormal in float16.
    """

    @property
    def lanes(self) -> int:
        """Lanes of a vector over the head dimension."""
        return next(n for n in (16, 8, 4, 2, 1) if self.head_dim % n == 0)

    @property
    def stored(self) -> str:
        """The dtype of an element of K or V in a page."""
        return "int8" if self.dtype == "q8" else self.dtype

    @property
    def scale_groups(self) -> int:
        """Scales of one token's K (or V) in a head; 0 where there are none."""
        return 0 if self.dtype != "q8" else max(1, self.head_dim // 32 if self.head_dim % 32 == 0 else 1)

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's K (or V) in a head."""
        return self.head_dim * _ITEM_BYTES[self.dtype] + 2 * self.scale_groups

    @property
    def head_bytes(self) -> int:
        """Bytes of a head in a page."""
        return 2 * PAGE * self.row_bytes

    @property
    def page_bytes(self) -> int:
        return self.num_kv_heads * self.head_bytes

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in one layer of the cache."""
        return 2 * self.num_kv_heads * self.row_bytes

    @property
    def cache_dtype(self) -> str:
        """The dtype that TVM's cache is told."""
        return "int8"

    @property
    def cache_head_dim(self) -> int:
        """TVM's head dimension: the largest that divides the bytes of a token's K and those of its q, k and v.

        It leaves `cache_heads` no smaller than `num_heads`, because TVM keeps one log-sum-exp for each of them.
        """
        kv = self.bytes_per_token // 2
        common = math.gcd(kv, self._qkv_bytes)
        fitting = (n for n in range(common, 0, -1) if common % n == 0)
        return next(n for n in fitting if (self._qkv_bytes - 2 * kv) // n >= self.num_heads)

    @property
    def cache_kv_heads(self) -> int:
        return self.bytes_per_token // 2 // self.cache_head_dim

    @property
    def cache_heads(self) -> int:
        """TVM's query heads: with its KV heads they make the float32 bytes of q, k and v."""
        return self._qkv_bytes // self.cache_head_dim - 2 * self.cache_kv_heads

    @property
    def _qkv_bytes(self) -> int:
        return 4 * self.head_dim * (self.num_heads + 2 * self.num_kv_heads)


@dataclass(frozen=True)
class Pages:
    """The pages argument of a function, as its elements and its scales (None where there are none)."""

    shape: AttentionShape
    elements: Buffer
    scales: Buffer | None = None

    @property
    def line(self) -> int:
        """Elements of a cache line of 64 bytes."""
        return 64 // _ITEM_BYTES[self.shape.dtype]

    def k(self, page: Expr, head: Expr) -> Expr:
        """Index of K[0, 0] of a head in `elements`; dimension d of slot i is d * 16 + i further."""
        s = self.shape
        return (I.cast(page, "int64") * s.num_kv_heads + head) * (s.head_bytes // _ITEM_BYTES[s.dtype])

    def v(self, page: Expr, head: Expr) -> Expr:
        """Index of V[0, 0]; dimension d of slot i is i * head_dim + d further."""
        return self.k(page, head) + PAGE * self.shape.head_dim

    def scale(self, page: Expr, head: Expr, of_v: int) -> Expr:
        """Index of the first scale of K (or V) in `scales`; that of group g and slot i is g * 16 + i further."""
        s = self.shape
        base = (I.cast(page, "int64") * s.num_kv_heads + head) * (s.head_bytes // 2)
        return base + PAGE * s.head_dim + of_v * PAGE * s.scale_groups


def pages_argument(shape: AttentionShape) -> Tensor:
    """The pages int8[P, 2, cache_kv_heads, 16, cache_head_dim], as `Pages`."""
    count = tirx.Var("num_pages", "int64")
    dims = (count, 2, shape.cache_kv_heads, PAGE, shape.cache_head_dim)
    return Tensor(dims, shape.cache_dtype, _views(shape, count, shape.page_bytes), functools.partial(Pages, shape))


def kv_argument(shape: AttentionShape, *rows: Expr) -> Tensor:
    """k or v of new tokens as `split` leaves them: a row's elements [kv_heads, D], then its scales [kv_heads, groups].

    The kernel gets (elements, scales or None).
    """
    count, dims = math.prod(rows), (*rows, shape.cache_kv_heads, shape.cache_head_dim)
    views = _views(shape, count, shape.num_kv_heads * shape.row_bytes)
    return Tensor(dims, shape.cache_dtype, views, lambda elements, scales=None: (elements, scales))


def _views(shape: AttentionShape, rows: Expr, row_bytes: int) -> list[tuple[Expr, str]]:
    elements = (rows * (row_bytes // _ITEM_BYTES[shape.dtype]), shape.stored)
    return [elements, (rows * (row_bytes // 2), "float16")] if shape.scale_groups else [elements]


def heads_argument(shape: AttentionShape, rows: Expr) -> Tensor:
    """q or output: float32[rows, num_heads, head_dim] at the beginning of TVM's rows."""
    size = rows * (shape.num_heads * shape.head_dim)
    return Tensor((rows, shape.cache_heads, shape.cache_head_dim), shape.cache_dtype, [(size, "float32")])


def sums_argument(shape: AttentionShape, rows: Expr) -> Tensor:
    """Log-sum-exps: float32[rows, num_heads] at the beginning of TVM's [rows, cache_heads]."""
    return Tensor((rows, shape.cache_heads), "float32", [(rows * shape.num_heads, "float32")])


def index_argument(*dims: Expr) -> Tensor:
    """Indices or positions: TVM sends all of them in one buffer."""
    return Tensor(dims, "int32", offset=True)


def kv_row(shape: AttentionShape, token: Expr) -> tuple[Expr, Expr]:
    """Where a token's elements and its scales begin in what `match_kv` gives."""
    row = shape.num_kv_heads * shape.row_bytes
    return token * (row // _ITEM_BYTES[shape.dtype]), token * (row // 2) + shape.num_kv_heads * shape.head_dim // 2


def for_tokens(count: Expr, body: object) -> None:
    """body(t) for every token, in parallel where there are many."""
    assert callable(body)
    with I.If(count < _MANY_TOKENS):
        with I.Then(), I.serial(0, count) as t:
            body(t)
        with I.Else(), I.parallel(0, count) as t:
            body(t)


def split(shape: AttentionShape) -> tirx.PrimFunc:
    """qkv f32[n, heads + 2 kv_heads, D] to q f32[n, heads, D] and k, v in the format of the cache.

    RoPE is in the graph (nn/rope.py), so `apply_rope` is always 0.
    """
    heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    lanes = shape.lanes

    n = tirx.Var("n", "int64")
    dims = (n, shape.cache_heads + 2 * shape.cache_kv_heads, shape.cache_head_dim)
    arguments: dict[str, Argument] = {
        "qkv": Tensor(dims, shape.cache_dtype, [(n * ((heads + 2 * kv_heads) * dim), "float32")]),
        "position_map": index_argument(n),
        "q": heads_argument(shape, n),
        "k": kv_argument(shape, n),
        "v": kv_argument(shape, n),
        "apply_rope": "int64",
    }

    def body(qkv: Buffer, position_map: Buffer, q: Buffer, k: Rows, v: Rows, apply_rope: Expr) -> None:
        def token(t: Expr) -> None:
            row = t * ((heads + 2 * kv_heads) * dim)
            with I.serial(0, heads * dim // lanes) as i:
                store(q, t * (heads * dim) + i * lanes, read(qkv, row + i * lanes, lanes), lanes)
            for part, (elements, scales) in enumerate((k, v)):
                begin, first_scale = kv_row(shape, t)
                with I.serial(0, kv_heads) as h:
                    source = row + (heads + part * kv_heads + h) * dim
                    if scales is None:
                        _convert(qkv, source, elements, begin + h * dim, shape)
                    else:
                        at = first_scale + h * shape.scale_groups
                        _quantize(qkv, source, elements, begin + h * dim, scales, at, shape)

        for_tokens(n, token)

    return function("kv_cache_split", arguments, body)


def _convert(x: Buffer, source: Expr, elements: Buffer, target: Expr, shape: AttentionShape) -> None:
    """elements[target:] = x[source : source + head_dim] in the cache's dtype."""
    with I.serial(0, shape.head_dim // shape.lanes) as i:
        item = read(x, source + i * shape.lanes, shape.lanes)
        store(elements, target + i * shape.lanes, I.cast(item, lanes_of(shape.stored, shape.lanes)), shape.lanes)


def _quantize(
    x: Buffer, source: Expr, codes: Buffer, target: Expr, scales: Buffer, at: Expr, shape: AttentionShape
) -> None:
    """Codes and scales of one head's K or V of one token (AttentionShape states the error)."""
    size = shape.head_dim // shape.scale_groups
    top = I.alloc_buffer((1,), "float32")
    with I.serial(0, shape.scale_groups) as g:
        put(top, 0, I.float32(0))
        with I.serial(0, size) as d:
            put(top, 0, I.max(top[0], I.fabs(x[source + g * size + d])))
        scale = value(I.cast(I.min(top[0] * I.float32(1 / 127), I.float32(65504)), "float16"))
        put(scales, at + g, scale)
        step = value(I.cast(scale, "float32"))
        inverse = value(I.if_then_else(step > I.float32(0), I.float32(1) / step, I.float32(0)))
        with I.serial(0, size) as d:
            code = I.nearbyint(x[source + g * size + d] * inverse)
            code = I.min(I.max(code, I.float32(-127)), I.float32(127))
            put(codes, target + g * size + d, I.cast(I.cast(code, "int32"), "int8"))


def append(shape: AttentionShape) -> tirx.PrimFunc:
    """Write k, v of new tokens to their slots; position_map[n] is page*16 + slot, or -1 to skip."""
    kv_heads, dim, groups = shape.num_kv_heads, shape.head_dim, shape.scale_groups

    n = tirx.Var("n", "int64")
    new = kv_argument(shape, n)
    arguments: dict[str, Argument] = {
        "pages": pages_argument(shape),
        "k": new,
        "v": new,
        "position_map": index_argument(n),
    }

    def body(pages: Pages, new_k: Rows, new_v: Rows, position_map: Buffer) -> None:
        def token(t: Expr) -> None:
            with I.If(position_map[t] >= 0), I.Then(), I.serial(0, kv_heads) as h:
                page, slot = value(position_map[t] // PAGE), value(position_map[t] % PAGE)
                (k, k_scales), (v, v_scales) = new_k, new_v
                begin, first_scale = kv_row(shape, t)
                with I.serial(0, dim) as d:
                    put(pages.elements, pages.k(page, h) + d * PAGE + slot, k[begin + h * dim + d])
                with I.serial(0, dim // shape.lanes) as i:
                    item = read(v, begin + h * dim + i * shape.lanes, shape.lanes)
                    store(pages.elements, pages.v(page, h) + slot * dim + i * shape.lanes, item, shape.lanes)
                for of_v, scales in enumerate((k_scales, v_scales)):
                    if scales is not None:
                        with I.serial(0, groups) as g:
                            at = pages.scale(page, h, of_v) + g * PAGE + slot
                            put(pages.scales, at, scales[first_scale + h * groups + g])

        for_tokens(n, token)

    return function("kv_cache_append", arguments, body)


def merge(shape: AttentionShape) -> tirx.PrimFunc:
    """(v, s) <- softmax-weighted union of (v, s) and (v_other, s_other).

    v f32[n, heads, D] and s f32[n, heads], in base 2, lie at the beginning of TVM's rows.
    """
    heads, dim, lanes = shape.num_heads, shape.head_dim, shape.lanes

    n = tirx.Var("n", "int64")
    v, s = heads_argument(shape, n), sums_argument(shape, n)
    arguments: dict[str, Argument] = {"v": v, "s": s, "v_other": v, "s_other": s}

    def body(mine: Buffer, sums: Buffer, other: Buffer, other_sums: Buffer) -> None:
        with I.parallel(0, n) as t:
            weight = I.alloc_buffer((2,), "float32")
            with I.serial(0, heads) as h:
                row = value(t * heads + h)
                top = value(I.max(sums[row], other_sums[row]))
                put(weight, 0, exp2(sums[row] - top, 1))
                put(weight, 1, exp2(other_sums[row] - top, 1))
                whole = value(weight[0] + weight[1])
                scale = value(I.float32(1) / whole)
                with I.serial(0, dim // lanes) as i:
                    at = value(row * dim + i * lanes)
                    both = [read(x, at, lanes) * splat(weight[k] * scale, lanes) for k, x in enumerate((mine, other))]
                    store(mine, at, both[0] + both[1], lanes)
                put(sums, row, top + I.log2(whole))

    return function("merge_state", arguments, body)


def copy_page(shape: AttentionShape) -> tirx.PrimFunc:
    """Copy page `source` to page `destination` (a fork inside a page); the first `length` tokens count."""

    count = tirx.Var("num_pages", "int64")
    dims = (count, 2, shape.cache_kv_heads, PAGE, shape.cache_head_dim)
    pages = Tensor(dims, shape.cache_dtype, [(count * shape.page_bytes, "int8")])
    arguments: dict[str, Argument] = {"pages": pages, "source": "int64", "destination": "int64", "length": "int64"}

    def body(data: Buffer, source: Expr, destination: Expr, length: Expr) -> None:
        with I.serial(0, shape.page_bytes // PAGE) as i:
            moved = read(data, source * shape.page_bytes + i * PAGE, PAGE)
            store(data, destination * shape.page_bytes + i * PAGE, moved, PAGE)

    return function("kv_cache_copy_page", arguments, body)


def compact(shape: AttentionShape) -> tirx.PrimFunc:
    """Move tokens inside a sequence after a token tree was pruned: copy_indptr[B+1], copy_pairs [2, n] (from, to)."""
    dim = shape.head_dim

    batch, moves = tirx.Var("sequences", "int32"), tirx.Var("moves", "int32")
    arguments: dict[str, Argument] = {
        "pages": pages_argument(shape),
        "indptr": index_argument(batch),
        "pairs": index_argument(2, moves),
        "batch": "int32",
    }

    def body(pages: Pages, indptr: Buffer, pairs: Buffer, batch: Expr) -> None:
        with I.serial(0, batch) as b, I.serial(0, indptr[b + 1] - indptr[b]) as i, I.serial(0, shape.num_kv_heads) as h:
            a, z = value(pairs[0, indptr[b] + i]), value(pairs[1, indptr[b] + i])
            with I.serial(0, dim) as d:
                moved = pages.elements[pages.k(a // PAGE, h) + d * PAGE + a % PAGE]
                put(pages.elements, pages.k(z // PAGE, h) + d * PAGE + z % PAGE, moved)
                moved = pages.elements[pages.v(a // PAGE, h) + a % PAGE * dim + d]
                put(pages.elements, pages.v(z // PAGE, h) + z % PAGE * dim + d, moved)
            if pages.scales is not None:
                for of_v in (0, 1):
                    with I.serial(0, shape.scale_groups) as g:
                        moved = pages.scales[pages.scale(a // PAGE, h, of_v) + g * PAGE + a % PAGE]
                        put(pages.scales, pages.scale(z // PAGE, h, of_v) + g * PAGE + z % PAGE, moved)

    return function("kv_cache_compact", arguments, body)


def read_back(shape: AttentionShape, num_layers: int) -> tirx.PrimFunc:
    """K and V of one layer at the given slots, for `debug_get_kv`: rows [layers, n] as `split` makes them."""
    kv_heads, dim = shape.num_kv_heads, shape.head_dim

    n = tirx.Var("n", "int64")
    found = kv_argument(shape, num_layers, n)
    arguments: dict[str, Argument] = {
        "pages": pages_argument(shape),
        "position_map": index_argument(n),
        "k": found,
        "v": found,
        "layer": "int64",
    }

    def body(pages: Pages, position_map: Buffer, k: Rows, v: Rows, layer: Expr) -> None:
        with I.serial(0, n) as t, I.serial(0, kv_heads) as h:
            page, slot = value(position_map[t] // PAGE), value(position_map[t] % PAGE)
            begin, first_scale = kv_row(shape, layer * n + t)
            with I.serial(0, dim) as d:
                put(k[0], begin + h * dim + d, pages.elements[pages.k(page, h) + d * PAGE + slot])
                put(v[0], begin + h * dim + d, pages.elements[pages.v(page, h) + slot * dim + d])
            for of_v, (_, scales) in enumerate((k, v)):
                if scales is not None and pages.scales is not None:
                    with I.serial(0, shape.scale_groups) as g:
                        found = pages.scales[pages.scale(page, h, of_v) + g * PAGE + slot]
                        put(scales, first_scale + h * shape.scale_groups + g, found)

    return function("kv_cache_read_back", arguments, body)
