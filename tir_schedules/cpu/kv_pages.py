"""Pages of the KV cache on CPUs: their shape, how tokens get into them, and how they are copied and merged.

A page holds 16 tokens. Its K half lies transposed, [head_dim, 16], for the loads of `attention.py`; its V half
is [16, head_dim]. Calling conventions: tvm/src/runtime/vm/paged_kv_cache.cc.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.script import tirx as T

PAGE = 16


@dataclass(frozen=True)
class AttentionShape:
    """Static facts of a model's attention: head counts, head_dim, the dtype of q, k, v and the KV cache."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    softcap: float = 0.0
    sliding_window: int = 0

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def lanes(self) -> int:
        return next(n for n in (16, 8, 4, 2) if self.head_dim % n == 0)


def append(shape: AttentionShape) -> tirx.PrimFunc:
    """Write k, v [n, kv_heads, D] of new tokens to their slots; position_map[n] is page*16 + slot, or -1 to skip."""
    kv_heads, dim, dtype = shape.num_kv_heads, shape.head_dim, shape.dtype
    page_elements = PAGE * dim

    @T.prim_func(s_tir=True)
    def kv_cache_append(pages_handle: T.handle, k_handle: T.handle, v_handle: T.handle, map_handle: T.handle):
        n = T.int64()
        num_pages = T.int64()
        o1 = T.int64()
        o2 = T.int32()
        pages = T.match_buffer(pages_handle, (num_pages, 2, kv_heads, 16, dim), dtype, elem_offset=o1)
        K = T.match_buffer(k_handle, (n, kv_heads, dim), dtype)
        V = T.match_buffer(v_handle, (n, kv_heads, dim), dtype)
        position_map = T.match_buffer(map_handle, (n,), "int32", elem_offset=o2)
        flat = T.decl_buffer((num_pages * (2 * kv_heads * page_elements),), dtype, data=pages.data, elem_offset=o1)
        for t in T.serial(n):
            if position_map[t] != -1:
                for h in T.serial(kv_heads):
                    base: T.let[T.int64] = (T.int64(position_map[t] // 16) * 2 * kv_heads + h) * page_elements
                    slot: T.let[T.int32] = position_map[t] % 16
                    for d in T.serial(dim):
                        flat[base + d * 16 + slot] = K[t, h, d]
                    for d in T.vectorized(dim):
                        flat[base + kv_heads * page_elements + slot * dim + d] = V[t, h, d]

    return kv_cache_append


def split(shape: AttentionShape) -> tirx.PrimFunc:
    """qkv [n, heads + 2 kv_heads, D] to q, k, v. RoPE is in the graph (nn/rope.py), so `apply_rope` is always 0."""
    heads, kv_heads, dim, dtype = shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.dtype

    @T.prim_func(s_tir=True)
    def kv_cache_split(
        qkv_handle: T.handle,
        map_handle: T.handle,
        q_handle: T.handle,
        k_handle: T.handle,
        v_handle: T.handle,
        apply_rope: T.int64,
    ):
        n = T.int64()
        o1 = T.int64()
        QKV = T.match_buffer(qkv_handle, (n, heads + 2 * kv_heads, dim), dtype)
        position_map = T.match_buffer(map_handle, (n,), "int32", elem_offset=o1)
        Q = T.match_buffer(q_handle, (n, heads, dim), dtype)
        K = T.match_buffer(k_handle, (n, kv_heads, dim), dtype)
        V = T.match_buffer(v_handle, (n, kv_heads, dim), dtype)
        for t in T.serial(n):
            for h in T.serial(heads):
                for d in T.vectorized(dim):
                    Q[t, h, d] = QKV[t, h, d]
            for h in T.serial(kv_heads):
                for d in T.vectorized(dim):
                    K[t, h, d] = QKV[t, heads + h, d]
                for d in T.vectorized(dim):
                    V[t, h, d] = QKV[t, heads + kv_heads + h, d]

    return kv_cache_split


def merge(shape: AttentionShape) -> tirx.PrimFunc:
    """(v, s) <- softmax-weighted union of (v, s) and (v_other, s_other); v [n, heads, D], s f32[n, heads] in base 2."""
    heads, dim, dtype = shape.num_heads, shape.head_dim, shape.dtype

    @T.prim_func(s_tir=True)
    def merge_state(v_handle: T.handle, s_handle: T.handle, v_other_handle: T.handle, s_other_handle: T.handle):
        n = T.int32()
        V = T.match_buffer(v_handle, (n, heads, dim), dtype)
        S = T.match_buffer(s_handle, (n, heads), "float32")
        V_other = T.match_buffer(v_other_handle, (n, heads, dim), dtype)
        S_other = T.match_buffer(s_other_handle, (n, heads), "float32")
        for t in T.parallel(n):
            w = T.alloc_buffer((4,), "float32")
            for h in T.serial(heads):
                w[0] = T.max(S[t, h], S_other[t, h])
                w[1] = T.exp2(S[t, h] - w[0])
                w[2] = T.exp2(S_other[t, h] - w[0])
                w[3] = T.float32(1) / (w[1] + w[2])
                for d in T.serial(dim):
                    V[t, h, d] = T.cast(
                        (T.cast(V[t, h, d], "float32") * w[1] + T.cast(V_other[t, h, d], "float32") * w[2]) * w[3],
                        dtype,
                    )
                S[t, h] = w[0] + T.log2(w[1] + w[2])

    return merge_state


def copy_page(shape: AttentionShape) -> tirx.PrimFunc:
    """Copy the first `length` tokens of page `source` to page `destination` (a fork inside a page)."""
    kv_heads, dim, dtype = shape.num_kv_heads, shape.head_dim, shape.dtype
    page_elements = PAGE * dim

    @T.prim_func(s_tir=True)
    def kv_cache_copy_page(pages_handle: T.handle, source: T.int64, destination: T.int64, length: T.int64):
        num_pages = T.int32()
        o1 = T.int64()
        pages = T.match_buffer(pages_handle, (num_pages, 2, kv_heads, 16, dim), dtype, elem_offset=o1)
        flat = T.decl_buffer(
            (T.int64(num_pages) * (2 * kv_heads * page_elements),), dtype, data=pages.data, elem_offset=o1
        )
        for i in T.serial(2 * kv_heads * page_elements):
            flat[destination * (2 * kv_heads * page_elements) + i] = flat[source * (2 * kv_heads * page_elements) + i]

    return kv_cache_copy_page


def compact(shape: AttentionShape) -> tirx.PrimFunc:
    """Move tokens inside a sequence after a token tree was pruned: copy_indptr[B+1], copy_pairs [2, n] (from, to)."""
    kv_heads, dim, dtype = shape.num_kv_heads, shape.head_dim, shape.dtype
    page_elements = PAGE * dim

    @T.prim_func(s_tir=True)
    def kv_cache_compact(pages_handle: T.handle, indptr_handle: T.handle, pairs_handle: T.handle, batch: T.int32):
        num_pages = T.int32()
        total = T.int32()
        o1 = T.int32()
        o2 = T.int32()
        o3 = T.int64()
        pages = T.match_buffer(pages_handle, (num_pages, 2, kv_heads, 16, dim), dtype, elem_offset=o3)
        indptr = T.match_buffer(indptr_handle, (batch + 1,), "int32", elem_offset=o1)
        pairs = T.match_buffer(pairs_handle, (2, total), "int32", elem_offset=o2)
        flat = T.decl_buffer(
            (T.int64(num_pages) * (2 * kv_heads * page_elements),), dtype, data=pages.data, elem_offset=o3
        )
        for b in T.serial(batch):
            for i in T.serial(indptr[b + 1] - indptr[b]):
                source: T.let[T.int32] = pairs[0, indptr[b] + i]
                target: T.let[T.int32] = pairs[1, indptr[b] + i]
                for h in T.serial(kv_heads):
                    from_base: T.let[T.int64] = (T.int64(source // 16) * 2 * kv_heads + h) * page_elements
                    to_base: T.let[T.int64] = (T.int64(target // 16) * 2 * kv_heads + h) * page_elements
                    for d in T.serial(dim):
                        flat[to_base + d * 16 + target % 16] = flat[from_base + d * 16 + source % 16]
                        flat[to_base + kv_heads * page_elements + target % 16 * dim + d] = flat[
                            from_base + kv_heads * page_elements + source % 16 * dim + d
                        ]

    return kv_cache_compact


def read_back(shape: AttentionShape, num_layers: int) -> tirx.PrimFunc:
    """K and V of one layer at the given slots, for `debug_get_kv`: k, v [layers, n, kv_heads, D]."""
    kv_heads, dim, dtype = shape.num_kv_heads, shape.head_dim, shape.dtype
    page_elements = PAGE * dim

    @T.prim_func(s_tir=True)
    def kv_cache_read_back(
        pages_handle: T.handle, map_handle: T.handle, k_handle: T.handle, v_handle: T.handle, layer: T.int64
    ):
        n = T.int64()
        num_pages = T.int64()
        o1 = T.int64()
        o2 = T.int64()
        pages = T.match_buffer(pages_handle, (num_pages, 2, kv_heads, 16, dim), dtype, elem_offset=o1)
        position_map = T.match_buffer(map_handle, (n,), "int32", elem_offset=o2)
        K = T.match_buffer(k_handle, (num_layers, n, kv_heads, dim), dtype)
        V = T.match_buffer(v_handle, (num_layers, n, kv_heads, dim), dtype)
        flat = T.decl_buffer((num_pages * (2 * kv_heads * page_elements),), dtype, data=pages.data, elem_offset=o1)
        for t in T.serial(n):
            for h in T.serial(kv_heads):
                base: T.let[T.int64] = (T.int64(position_map[t] // 16) * 2 * kv_heads + h) * page_elements
                for d in T.serial(dim):
                    K[layer, t, h, d] = flat[base + d * 16 + position_map[t] % 16]
                    V[layer, t, h, d] = flat[base + kv_heads * page_elements + position_map[t] % 16 * dim + d]

    return kv_cache_read_back
