"""y[i] = x[i'] w[expert of i]^T for CPUs: mixture-of-experts layers over packed weights, one row at a time.

Each row streams its expert's weights once. In prefill several rows of one expert could share that stream; they do
not yet, so mixture models prefill at the speed of their decode.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from tir_schedules.cpu.matmul import packed_of
from tir_schedules.macro import macro
from tir_schedules.op import Declined, Op


def expert_matmul(op: Op) -> tirx.PrimFunc | Declined:
    """x f32[m or m * top, K], packed W [experts], ids i32[m, top] -> y f32[m * top, N]."""
    if op.str("layout") != "rows16":
        return Declined(f"weight layout {op.str('layout')} has no CPU kernel")
    w = packed_of(op)
    n, k_size, n_blocks, bits, dtype = w.n, w.k, w.blocks, w.bits, w.dtype
    experts, top, shared = op.int("experts"), op.int("top"), bool(op.int("shared"))
    x_rows = 1 if shared else top
    group = w.group_size if bits else 8
    groups = -(-k_size // group)
    per_word, words = (w.codes_per_word, w.words_per_group) if bits else (1, 8)
    mask, zero_point = (1 << bits) - 1, float(w.zero_point)

    @macro
    def store(Y, acc, row, block):
        if block < n // 16:
            Y[row, T.ramp(block * 16, 1, 16)] = acc[0, T.ramp(0, 1, 16)]
        else:
            for lane in T.serial(n % 16):
                Y[row, block * 16 + lane] = acc[0, lane]

    if bits == 0:

        @T.prim_func(s_tir=True)
        def plain(x_handle: T.handle, w_handle: T.handle, ids_handle: T.handle, y_handle: T.handle):
            m = T.int64()
            X = T.match_buffer(x_handle, (m * x_rows, k_size), "float32")
            W = T.match_buffer(w_handle, (experts, n_blocks, k_size, 16), dtype)
            ids = T.match_buffer(ids_handle, (m, top), "int32")
            Y = T.match_buffer(y_handle, (m * top, n), "float32")
            for i in T.serial(m * top):
                for block in T.parallel(n_blocks):
                    acc = T.alloc_buffer((1, 16), "float32")
                    expert: T.let[T.int32] = T.min(T.max(ids[i // top, i % top], 0), experts - 1)
                    row: T.let[T.int64] = i // top if shared else i
                    acc[0, T.ramp(0, 1, 16)] = T.broadcast(T.float32(0), 16)
                    for k in T.serial(k_size):
                        acc[0, T.ramp(0, 1, 16)] = acc[0, T.ramp(0, 1, 16)] + T.cast(
                            W[expert, block, k, T.ramp(0, 1, 16)], "float32x16"
                        ) * T.broadcast(X[row, k], 16)
                    store(Y, acc, i, block)

        return plain

    @T.prim_func(s_tir=True)
    def quantized(x_handle: T.handle, w_handle: T.handle, s_handle: T.handle, ids_handle: T.handle, y_handle: T.handle):
        m = T.int64()
        X = T.match_buffer(x_handle, (m * x_rows, k_size), "float32")
        W = T.match_buffer(w_handle, (experts, n_blocks, groups * words, 16), "uint32")
        S = T.match_buffer(s_handle, (experts, n_blocks, groups, 16), dtype)
        ids = T.match_buffer(ids_handle, (m, top), "int32")
        Y = T.match_buffer(y_handle, (m * top, n), "float32")
        for i in T.serial(m * top):
            for block in T.parallel(n_blocks):
                acc = T.alloc_buffer((1, 16), "float32")
                part = T.alloc_buffer((2, 16), "float32")
                expert: T.let[T.int32] = T.min(T.max(ids[i // top, i % top], 0), experts - 1)
                row: T.let[T.int64] = i // top if shared else i
                acc[0, T.ramp(0, 1, 16)] = T.broadcast(T.float32(0), 16)
                for g in T.serial(groups):
                    part[0, T.ramp(0, 1, 16)] = T.broadcast(T.float32(0), 16)
                    part[1, T.ramp(0, 1, 16)] = T.broadcast(T.float32(0), 16)
                    for j in T.serial(words):
                        for c in T.unroll(per_word):
                            if g * group + j * per_word + c < k_size:
                                part[c % 2, T.ramp(0, 1, 16)] = part[c % 2, T.ramp(0, 1, 16)] + (
                                    T.cast(
                                        T.cast(
                                            T.bitwise_and(
                                                T.shift_right(
                                                    W[expert, block, g * words + j, T.ramp(0, 1, 16)],
                                                    T.broadcast(T.cast(c * bits, "uint32"), 16),
                                                ),
                                                T.broadcast(T.uint32(mask), 16),
                                            ),
                                            "int32x16",
                                        ),
                                        "float32x16",
                                    )
                                    - T.broadcast(T.float32(zero_point), 16)
                                ) * T.broadcast(X[row, g * group + j * per_word + c], 16)
                    acc[0, T.ramp(0, 1, 16)] = acc[0, T.ramp(0, 1, 16)] + (
                        part[0, T.ramp(0, 1, 16)] + part[1, T.ramp(0, 1, 16)]
                    ) * T.cast(S[expert, block, g, T.ramp(0, 1, 16)], "float32x16")
                store(Y, acc, i, block)

    return quantized
