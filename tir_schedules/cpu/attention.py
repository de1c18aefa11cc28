"""Paged attention for CPUs: decode, prefill over cached pages, prefill over the current chunk.

The functions have the calling convention that TVM's `vm.builtin.paged_attention_kv_cache_create` expects
(tvm/src/runtime/vm/paged_kv_cache.cc, attn_backend.h), but pages are our own: within a page of 16 tokens,
K lies transposed as [head_dim, 16] so that one vector load has the same dimension of 16 keys and a score
needs no horizontal sum; V lies as [16, head_dim]. Softmax is online (Milakov & Gimelshein 2018; FlashAttention,
Dao et al. 2022), in base 2. The query heads that share a KV head (GQA) are rows of one register tile.
"""

from __future__ import annotations

import math

from tvm import tirx
from tvm.script import tirx as T

from tir_schedules.cpu.kv_pages import PAGE, AttentionShape, append, compact, copy_page, merge, read_back, split
from tir_schedules.op import tag

LOG2E = math.log2(math.e)
MASKED = -3e38
LOWEST = -1e30


def _row_tile(rows: int) -> int:
    """Rows of one register tile: the largest of 4, 3, 2, 1 that divides `rows`."""
    return next(n for n in (4, 3, 2, 1) if rows % n == 0)


@T.macro
def _exp2(x, row, tmp):
    """x[row, :16] = 2**x[row, :16], relative error 2e-7 (Taylor to degree 6 on [-0.5, 0.5]); below 2**-126: 2**-126."""
    tmp[0, T.ramp(0, 1, 16)] = T.max(x[row, T.ramp(0, 1, 16)], T.broadcast(T.float32(-126), 16))
    tmp[1, T.ramp(0, 1, 16)] = T.nearbyint(tmp[0, T.ramp(0, 1, 16)])
    tmp[0, T.ramp(0, 1, 16)] = tmp[0, T.ramp(0, 1, 16)] - tmp[1, T.ramp(0, 1, 16)]
    tmp[2, T.ramp(0, 1, 16)] = T.broadcast(T.float32(0.0013333558146428443), 16) + tmp[
        0, T.ramp(0, 1, 16)
    ] * T.broadcast(T.float32(0.00015403530393381608), 16)
    tmp[2, T.ramp(0, 1, 16)] = (
        T.broadcast(T.float32(0.009618129107628477), 16) + tmp[0, T.ramp(0, 1, 16)] * tmp[2, T.ramp(0, 1, 16)]
    )
    tmp[2, T.ramp(0, 1, 16)] = (
        T.broadcast(T.float32(0.05550410866482158), 16) + tmp[0, T.ramp(0, 1, 16)] * tmp[2, T.ramp(0, 1, 16)]
    )
    tmp[2, T.ramp(0, 1, 16)] = (
        T.broadcast(T.float32(0.24022650695910072), 16) + tmp[0, T.ramp(0, 1, 16)] * tmp[2, T.ramp(0, 1, 16)]
    )
    tmp[2, T.ramp(0, 1, 16)] = (
        T.broadcast(T.float32(0.6931471805599453), 16) + tmp[0, T.ramp(0, 1, 16)] * tmp[2, T.ramp(0, 1, 16)]
    )
    x[row, T.ramp(0, 1, 16)] = (
        T.broadcast(T.float32(1), 16) + tmp[0, T.ramp(0, 1, 16)] * tmp[2, T.ramp(0, 1, 16)]
    ) * T.reinterpret(
        T.shift_left(
            T.cast(tmp[1, T.ramp(0, 1, 16)], "int32x16") + T.broadcast(T.int32(127), 16), T.broadcast(T.int32(23), 16)
        ),
        dtype="float32x16",
    )


@T.macro
def _begin(top, total, out, rows, lane_rows, head_dim):
    """Empty softmax state for `rows` queries."""
    for v in T.serial(lane_rows):
        top[v, T.ramp(0, 1, 16)] = T.broadcast(T.float32(LOWEST), 16)
    for r in T.serial(rows):
        total[r, T.ramp(0, 1, 16)] = T.broadcast(T.float32(0), 16)
        for i in T.serial(head_dim):
            out[r, i] = T.float32(0)


@T.macro
def _attend(q, K, k_base, V, v_base, v_stride, keys, first, last, state, shape, rows, tile, lane_rows):
    """Fold up to 16 keys into the state of `rows` queries; row r sees the keys with first[r] <= index <= last[r].

    K[k_base + d*16 + i] and V[v_base + i*v_stride + d] are key and value i of this block; `keys` of them exist.
    """
    top, total, out, score, alpha, acc, tmp = T.meta_var(state)
    for t in T.serial(rows // tile):
        for r in T.unroll(tile):
            for u in T.unroll(4):
                acc[r * 4 + u, T.ramp(0, 1, 16)] = T.broadcast(T.float32(0), 16)
        for d in T.serial(shape.head_dim // 4):
            for u in T.unroll(4):
                tmp[u, T.ramp(0, 1, 16)] = T.cast(K[T.ramp(k_base + (d * 4 + u) * 16, 1, 16)], "float32x16")
                for r in T.unroll(tile):
                    acc[r * 4 + u, T.ramp(0, 1, 16)] = (
                        acc[r * 4 + u, T.ramp(0, 1, 16)]
                        + T.broadcast(q[t * tile + r, d * 4 + u], 16) * tmp[u, T.ramp(0, 1, 16)]
                    )
        for d in T.serial(shape.head_dim % 4):
            tmp[0, T.ramp(0, 1, 16)] = T.cast(
                K[T.ramp(k_base + (shape.head_dim // 4 * 4 + d) * 16, 1, 16)], "float32x16"
            )
            for r in T.unroll(tile):
                acc[r * 4, T.ramp(0, 1, 16)] = (
                    acc[r * 4, T.ramp(0, 1, 16)]
                    + T.broadcast(q[t * tile + r, shape.head_dim // 4 * 4 + d], 16) * tmp[0, T.ramp(0, 1, 16)]
                )
        for r in T.unroll(tile):
            score[t * tile + r, T.ramp(0, 1, 16)] = (
                acc[r * 4, T.ramp(0, 1, 16)] + acc[r * 4 + 1, T.ramp(0, 1, 16)]
            ) + (acc[r * 4 + 2, T.ramp(0, 1, 16)] + acc[r * 4 + 3, T.ramp(0, 1, 16)])
    for r in T.serial(rows):
        if shape.softcap > 0.0:
            # cap * tanh(s / cap) with tanh(y) = 1 - 2 / (2**(2 y log2 e) + 1); q carries 1 / cap.
            score[r, T.ramp(0, 1, 16)] = T.min(
                T.max(score[r, T.ramp(0, 1, 16)], T.broadcast(T.float32(-20), 16)), T.broadcast(T.float32(20), 16)
            ) * T.broadcast(T.float32(2 * LOG2E), 16)
            _exp2(score, r, tmp)
            score[r, T.ramp(0, 1, 16)] = (
                T.broadcast(T.float32(1), 16)
                - T.broadcast(T.float32(2), 16) / (score[r, T.ramp(0, 1, 16)] + T.broadcast(T.float32(1), 16))
            ) * T.broadcast(T.float32(shape.softcap * LOG2E), 16)
        score[r, T.ramp(0, 1, 16)] = T.Select(
            T.And(
                T.ramp(0, 1, 16) <= T.broadcast(T.min(last[r], keys - 1), 16),
                T.ramp(0, 1, 16) >= T.broadcast(first[r], 16),
            ),
            score[r, T.ramp(0, 1, 16)],
            T.broadcast(T.float32(MASKED), 16),
        )
        alpha[r // 16, r % 16] = T.max(
            top[r // 16, r % 16],
            T.call_llvm_pure_intrin(
                T.llvm_lookup_intrinsic_id("llvm.vector.reduce.fmax"), score[r, T.ramp(0, 1, 16)], dtype="float32"
            ),
        )
        score[r, T.ramp(0, 1, 16)] = score[r, T.ramp(0, 1, 16)] - T.broadcast(alpha[r // 16, r % 16], 16)
        _exp2(score, r, tmp)
    for v in T.serial(lane_rows):
        tmp[3, T.ramp(0, 1, 16)] = alpha[v, T.ramp(0, 1, 16)]
        alpha[v, T.ramp(0, 1, 16)] = top[v, T.ramp(0, 1, 16)] - tmp[3, T.ramp(0, 1, 16)]
        top[v, T.ramp(0, 1, 16)] = tmp[3, T.ramp(0, 1, 16)]
        _exp2(alpha, v, tmp)
    for r in T.serial(rows):
        total[r, T.ramp(0, 1, 16)] = (
            total[r, T.ramp(0, 1, 16)] * T.broadcast(alpha[r // 16, r % 16], 16) + score[r, T.ramp(0, 1, 16)]
        )
    for t in T.serial(rows // tile):
        for v in T.serial(shape.head_dim // shape.lanes):
            for r in T.unroll(tile):
                acc[r, T.ramp(0, 1, shape.lanes)] = out[
                    t * tile + r, T.ramp(v * shape.lanes, 1, shape.lanes)
                ] * T.broadcast(alpha[(t * tile + r) // 16, (t * tile + r) % 16], shape.lanes)
            for i in T.serial(keys):
                tmp[0, T.ramp(0, 1, shape.lanes)] = T.cast(
                    V[T.ramp(v_base + i * v_stride + v * shape.lanes, 1, shape.lanes)], f"float32x{shape.lanes}"
                )
                for r in T.unroll(tile):
                    acc[r, T.ramp(0, 1, shape.lanes)] = (
                        acc[r, T.ramp(0, 1, shape.lanes)]
                        + T.broadcast(score[t * tile + r, i], shape.lanes) * tmp[0, T.ramp(0, 1, shape.lanes)]
                    )
            for r in T.unroll(tile):
                out[t * tile + r, T.ramp(v * shape.lanes, 1, shape.lanes)] = acc[r, T.ramp(0, 1, shape.lanes)]


@T.macro
def _load_queries(q, Q, row0, head0, queries, sm_scale, shape, rows):
    """q[i*group + g] = scaled Q[row0 + i, head0 + g]; rows past `queries` stay zero."""
    for i in T.serial(rows // shape.group):
        for g in T.serial(shape.group):
            for d in T.serial(shape.head_dim):
                q[i * shape.group + g, d] = T.if_then_else(
                    i < queries,
                    T.cast(Q[T.min(row0 + i, row0 + queries - 1), head0 + g, d], "float32")
                    * (sm_scale * T.float32(LOG2E if shape.softcap == 0.0 else 1.0 / shape.softcap)),
                    T.float32(0),
                )


@T.macro
def _store(Out, Lse, row0, head0, queries, state, shape, rows):
    """Write out / total and log2-sum-exp2 of the rows that are queries."""
    top, total, out, score, alpha, acc, tmp = T.meta_var(state)
    for r in T.serial(rows):
        if r // shape.group < queries:
            tmp[3, 0] = T.float32(0)
            for i in T.serial(16):
                tmp[3, 0] = tmp[3, 0] + total[r, i]
            tmp[3, 0] = T.max(tmp[3, 0], T.float32(1e-37))
            tmp[3, 1] = T.float32(1) / tmp[3, 0]
            for d in T.serial(shape.head_dim):
                Out[row0 + r // shape.group, head0 + r % shape.group, d] = T.cast(out[r, d] * tmp[3, 1], shape.dtype)
            Lse[row0 + r // shape.group, head0 + r % shape.group] = top[r // 16, r % 16] + T.log2(tmp[3, 0])


def decode(shape: AttentionShape, sliding: bool) -> tirx.PrimFunc:
    """One query a sequence against its pages, in parallel over sequences and KV heads.

    q, output [B, heads, D]; pages [P, 2, kv_heads, 16, D]; lse f32[B, heads] in base 2.
    """
    heads, kv_heads, dim, dtype, group = shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.dtype, shape.group
    rows, tile, lane_rows = group, _row_tile(group), -(-group // 16)
    window = shape.sliding_window if sliding else 0
    page_elements = PAGE * dim

    @T.prim_func(s_tir=True)
    def paged_decode(
        q_handle: T.handle,
        pages_handle: T.handle,
        indptr_handle: T.handle,
        values_handle: T.handle,
        length_handle: T.handle,
        k_position_handle: T.handle,
        q_position_handle: T.handle,
        output_handle: T.handle,
        lse_handle: T.handle,
        rotary_mode: T.int32,
        rope_scale: T.float32,
        rope_theta: T.float32,
        sm_scale: T.float32,
    ):
        batch = T.int32()
        num_pages = T.int32()
        used_pages = T.int32()
        o1 = T.int32()
        o2 = T.int32()
        o3 = T.int32()
        o4 = T.int32()
        o5 = T.int32()
        o6 = T.int64()
        Q = T.match_buffer(q_handle, (batch, heads, dim), dtype)
        pages = T.match_buffer(pages_handle, (num_pages, 2, kv_heads, 16, dim), dtype, elem_offset=o6)
        indptr = T.match_buffer(indptr_handle, (batch + 1,), "int32", elem_offset=o1)
        values = T.match_buffer(values_handle, (used_pages,), "int32", elem_offset=o2)
        length = _length_info(length_handle, batch, sliding, o3)
        k_position = T.match_buffer(k_position_handle, (batch,), "int32", elem_offset=o4)
        q_position = T.match_buffer(q_position_handle, (batch,), "int32", elem_offset=o5)
        Out = T.match_buffer(output_handle, (batch, heads, dim), dtype)
        Lse = T.match_buffer(lse_handle, (batch, heads), "float32")
        flat = T.decl_buffer(
            (T.int64(num_pages) * (2 * kv_heads * page_elements),), dtype, data=pages.data, elem_offset=o6
        )
        for task in T.parallel(batch * kv_heads):
            q = T.alloc_buffer((rows, dim), "float32")
            top = T.alloc_buffer((lane_rows, 16), "float32")
            alpha = T.alloc_buffer((lane_rows, 16), "float32")
            total = T.alloc_buffer((rows, 16), "float32")
            out = T.alloc_buffer((rows, dim), "float32")
            score = T.alloc_buffer((rows, 16), "float32")
            acc = T.alloc_buffer((tile * 4, 16), "float32")
            tmp = T.alloc_buffer((4, 16), "float32")
            first = T.alloc_buffer((rows,), "int32")
            last = T.alloc_buffer((rows,), "int32")
            b: T.let[T.int32] = task // kv_heads
            h: T.let[T.int32] = task % kv_heads
            kv_len: T.let[T.int32] = T.if_then_else(
                indptr[b + 1] > indptr[b], (indptr[b + 1] - indptr[b] - 1) * 16 + _last_page_len(length, b, sliding), 0
            )
            oldest: T.let[T.int32] = T.max(q_position[b] - k_position[b] - window + 1, 0) if window > 0 else 0
            _load_queries(q, Q, b, h * group, 1, sm_scale, shape, rows)
            _begin(top, total, out, rows, lane_rows, dim)
            for p in T.serial((kv_len + 15) // 16 - oldest // 16):
                index: T.let[T.int32] = p + oldest // 16
                base: T.let[T.int64] = (T.int64(values[indptr[b] + index]) * 2 * kv_heads + h) * page_elements
                for r in T.serial(rows):
                    first[r] = oldest - index * 16
                    last[r] = 15
                _attend(
                    q,
                    flat,
                    base,
                    flat,
                    base + kv_heads * page_elements,
                    dim,
                    T.min(kv_len - index * 16, 16),
                    first,
                    last,
                    (top, total, out, score, alpha, acc, tmp),
                    shape,
                    rows,
                    tile,
                    lane_rows,
                )
            _store(Out, Lse, b, h * group, 1, (top, total, out, score, alpha, acc, tmp), shape, rows)

    return paged_decode


def _query_block(group: int) -> int:
    """Queries of one prefill task: about 32 rows, so that a KV block is loaded once for many."""
    return max(1, 32 // group)


def prefill_cached(shape: AttentionShape, sliding: bool) -> tirx.PrimFunc:
    """Queries of the current chunk against the pages of tokens before it.

    q, output [n, heads, D] with sequence b at rows q_indptr[b]:q_indptr[b+1]; pages as in `decode`.
    All cached keys precede the chunk, so only the sliding window masks.
    """
    heads, kv_heads, dim, dtype, group = shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.dtype, shape.group
    queries_per_task = _query_block(group)
    rows = queries_per_task * group
    tile, lane_rows = _row_tile(rows), -(-rows // 16)
    window = shape.sliding_window if sliding else 0
    page_elements = PAGE * dim

    @T.prim_func(s_tir=True)
    def paged_prefill(
        q_handle: T.handle,
        q_indptr_handle: T.handle,
        pages_handle: T.handle,
        indptr_handle: T.handle,
        values_handle: T.handle,
        length_handle: T.handle,
        k_position_handle: T.handle,
        q_position_handle: T.handle,
        output_handle: T.handle,
        lse_handle: T.handle,
        causal: T.int32,
        rotary_mode: T.int32,
        rope_scale: T.float32,
        rope_theta: T.float32,
        sm_scale: T.float32,
    ):
        batch = T.int32()
        n = T.int32()
        num_pages = T.int32()
        used_pages = T.int32()
        o0 = T.int32()
        o1 = T.int32()
        o2 = T.int32()
        o3 = T.int32()
        o4 = T.int32()
        o5 = T.int32()
        o6 = T.int64()
        Q = T.match_buffer(q_handle, (n, heads, dim), dtype)
        q_indptr = T.match_buffer(q_indptr_handle, (batch + 1,), "int32", elem_offset=o0)
        pages = T.match_buffer(pages_handle, (num_pages, 2, kv_heads, 16, dim), dtype, elem_offset=o6)
        indptr = T.match_buffer(indptr_handle, (batch + 1,), "int32", elem_offset=o1)
        values = T.match_buffer(values_handle, (used_pages,), "int32", elem_offset=o2)
        length = _length_info(length_handle, batch, sliding, o3)
        k_position = T.match_buffer(k_position_handle, (batch,), "int32", elem_offset=o4)
        q_position = T.match_buffer(q_position_handle, (n,), "int32", elem_offset=o5)
        Out = T.match_buffer(output_handle, (n, heads, dim), dtype)
        Lse = T.match_buffer(lse_handle, (n, heads), "float32")
        flat = T.decl_buffer(
            (T.int64(num_pages) * (2 * kv_heads * page_elements),), dtype, data=pages.data, elem_offset=o6
        )
        for b in T.serial(batch):
            for task in T.parallel(
                (q_indptr[b + 1] - q_indptr[b] + queries_per_task - 1) // queries_per_task * kv_heads
            ):
                q = T.alloc_buffer((rows, dim), "float32")
                top = T.alloc_buffer((lane_rows, 16), "float32")
                alpha = T.alloc_buffer((lane_rows, 16), "float32")
                total = T.alloc_buffer((rows, 16), "float32")
                out = T.alloc_buffer((rows, dim), "float32")
                score = T.alloc_buffer((rows, 16), "float32")
                acc = T.alloc_buffer((tile * 4, 16), "float32")
                tmp = T.alloc_buffer((4, 16), "float32")
                first = T.alloc_buffer((rows,), "int32")
                last = T.alloc_buffer((rows,), "int32")
                h: T.let[T.int32] = task % kv_heads
                row0: T.let[T.int32] = q_indptr[b] + task // kv_heads * queries_per_task
                queries: T.let[T.int32] = T.min(queries_per_task, q_indptr[b + 1] - row0)
                kv_len: T.let[T.int32] = T.if_then_else(
                    indptr[b + 1] > indptr[b],
                    (indptr[b + 1] - indptr[b] - 1) * 16 + _last_page_len(length, b, sliding),
                    0,
                )
                oldest: T.let[T.int32] = (
                    T.min(T.max(q_position[row0] - k_position[b] - window + 1, 0), kv_len) if window > 0 else 0
                )
                _load_queries(q, Q, row0, h * group, queries, sm_scale, shape, rows)
                _begin(top, total, out, rows, lane_rows, dim)
                for p in T.serial((kv_len + 15) // 16 - oldest // 16):
                    index: T.let[T.int32] = p + oldest // 16
                    base: T.let[T.int64] = (T.int64(values[indptr[b] + index]) * 2 * kv_heads + h) * page_elements
                    for r in T.serial(rows):
                        first[r] = (
                            q_position[row0] + r // group - k_position[b] - window + 1 - index * 16 if window > 0 else 0
                        )
                        last[r] = 15
                    _attend(
                        q,
                        flat,
                        base,
                        flat,
                        base + kv_heads * page_elements,
                        dim,
                        T.min(kv_len - index * 16, 16),
                        first,
                        last,
                        (top, total, out, score, alpha, acc, tmp),
                        shape,
                        rows,
                        tile,
                        lane_rows,
                    )
                _store(Out, Lse, row0, h * group, queries, (top, total, out, score, alpha, acc, tmp), shape, rows)

    return paged_prefill


def prefill_chunk(shape: AttentionShape) -> tirx.PrimFunc:
    """Causal attention of the current chunk with itself (TVM's "ragged" prefill).

    q, output [n, heads, D]; k, v [n, kv_heads, D]; sequence b at rows q_indptr[b]:q_indptr[b+1].
    The chunk is never longer than the sliding window (compiler/export.py caps it), so the window cannot mask.
    """
    heads, kv_heads, dim, dtype, group = shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.dtype, shape.group
    queries_per_task = _query_block(group)
    rows = queries_per_task * group
    tile, lane_rows = _row_tile(rows), -(-rows // 16)

    @T.prim_func(s_tir=True)
    def ragged_prefill(
        q_handle: T.handle,
        q_indptr_handle: T.handle,
        k_handle: T.handle,
        v_handle: T.handle,
        kv_indptr_handle: T.handle,
        q_position_handle: T.handle,
        k_position_handle: T.handle,
        output_handle: T.handle,
        lse_handle: T.handle,
        causal: T.int32,
        rotary_mode: T.int32,
        rope_scale: T.float32,
        rope_theta: T.float32,
        sm_scale: T.float32,
    ):
        batch = T.int32()
        n = T.int32()
        kv_n = T.int32()
        o0 = T.int32()
        o1 = T.int32()
        o4 = T.int32()
        o5 = T.int32()
        Q = T.match_buffer(q_handle, (n, heads, dim), dtype)
        q_indptr = T.match_buffer(q_indptr_handle, (batch + 1,), "int32", elem_offset=o0)
        K = T.match_buffer(k_handle, (kv_n, kv_heads, dim), dtype)
        V = T.match_buffer(v_handle, (kv_n, kv_heads, dim), dtype)
        kv_indptr = T.match_buffer(kv_indptr_handle, (batch + 1,), "int32", elem_offset=o1)
        q_position = T.match_buffer(q_position_handle, (n,), "int32", elem_offset=o5)
        k_position = T.match_buffer(k_position_handle, (batch,), "int32", elem_offset=o4)
        Out = T.match_buffer(output_handle, (n, heads, dim), dtype)
        Lse = T.match_buffer(lse_handle, (n, heads), "float32")
        flat_v = T.decl_buffer((T.int64(kv_n) * (kv_heads * dim),), dtype, data=V.data)
        kt = T.alloc_buffer((T.int64((kv_n + 15) // 16) * (kv_heads * dim * 16),), "float32")
        for b in T.serial(batch):
            for block in T.parallel((kv_indptr[b + 1] - kv_indptr[b] + 15) // 16):
                for h in T.serial(kv_heads):
                    for i in T.serial(16):
                        key: T.let[T.int32] = T.min(kv_indptr[b] + block * 16 + i, kv_indptr[b + 1] - 1)
                        for d in T.serial(dim):
                            kt[(T.int64(block) * kv_heads + h) * (dim * 16) + d * 16 + i] = T.cast(
                                K[key, h, d], "float32"
                            )
            for task in T.parallel(
                (q_indptr[b + 1] - q_indptr[b] + queries_per_task - 1) // queries_per_task * kv_heads
            ):
                q = T.alloc_buffer((rows, dim), "float32")
                top = T.alloc_buffer((lane_rows, 16), "float32")
                alpha = T.alloc_buffer((lane_rows, 16), "float32")
                total = T.alloc_buffer((rows, 16), "float32")
                out = T.alloc_buffer((rows, dim), "float32")
                score = T.alloc_buffer((rows, 16), "float32")
                acc = T.alloc_buffer((tile * 4, 16), "float32")
                tmp = T.alloc_buffer((4, 16), "float32")
                first = T.alloc_buffer((rows,), "int32")
                last = T.alloc_buffer((rows,), "int32")
                tasks: T.let[T.int32] = (q_indptr[b + 1] - q_indptr[b] + queries_per_task - 1) // queries_per_task
                h: T.let[T.int32] = task // tasks
                start: T.let[T.int32] = task % tasks * queries_per_task
                queries: T.let[T.int32] = T.min(queries_per_task, q_indptr[b + 1] - q_indptr[b] - start)
                _load_queries(q, Q, q_indptr[b] + start, h * group, queries, sm_scale, shape, rows)
                _begin(top, total, out, rows, lane_rows, dim)
                for p in T.serial((start + queries + 15) // 16):
                    for r in T.serial(rows):
                        first[r] = 0
                        last[r] = start + r // group - p * 16
                    _attend(
                        q,
                        kt,
                        (T.int64(p) * kv_heads + h) * (dim * 16),
                        flat_v,
                        (T.int64(kv_indptr[b] + p * 16) * kv_heads + h) * dim,
                        kv_heads * dim,
                        T.min(start + queries - p * 16, 16),
                        first,
                        last,
                        (top, total, out, score, alpha, acc, tmp),
                        shape,
                        rows,
                        tile,
                        lane_rows,
                    )
                _store(
                    Out,
                    Lse,
                    q_indptr[b] + start,
                    h * group,
                    queries,
                    (top, total, out, score, alpha, acc, tmp),
                    shape,
                    rows,
                )

    return ragged_prefill


def _length_info(handle, batch, sliding, offset):
    """TVM's length info: last page length [B], or [3, B] with window offset and sink for sliding layers."""
    shape = (3, batch) if sliding else (batch,)
    return T.match_buffer(handle, shape, "int32", elem_offset=offset)


def _last_page_len(length, b, sliding):
    """Tokens in the last page of sequence b."""
    return length[0, b] if sliding else length[b]


def kv_cache_functions(shape: AttentionShape, num_layers: int) -> dict[str, tirx.PrimFunc]:
    """Every function that `mlcpipe/nn/kv_cache.py` hands to TVM's cache, by its role there."""
    functions = {
        "append": append(shape),
        "prefill_chunk": prefill_chunk(shape),
        "prefill_cached": prefill_cached(shape, False),
        "decode": decode(shape, False),
        "prefill_cached_sliding": prefill_cached(shape, True),
        "decode_sliding": decode(shape, True),
        "merge": merge(shape),
        "split": split(shape),
        "copy_page": copy_page(shape),
        "read_back": read_back(shape, num_layers),
        "compact": compact(shape),
    }
    return {
        name: tag(func, f"kv_cache_{name}").with_attr("tirx.is_scheduled", True) for name, func in functions.items()
    }
