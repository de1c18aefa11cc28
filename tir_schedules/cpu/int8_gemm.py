"""Many rows times a 4-bit weight: codes become bytes once for all rows, on one scale for 128 of a row.

In a chunk of 128 with group scales s the byte of code c is round((c - zero_point) * s / t) for a step
t = max(s) * zero_point / 127. That moves a weight by about t / 2 = max(s) / 36 (zero_point 7), an eighteenth of what
4-bit rounding did, and a sum of 128 products stays in integers: 94 of 100 vector operations of the inner loop are dot
products, against 80 with scales for every 32. Activations have one scale for the same 128 numbers.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from tir_schedules.cpu.int8_activations import quantize_panels, whole_panels
from tir_schedules.cpu.int8_dot import Dot
from tir_schedules.cpu.matmul import Packed
from tir_schedules.cpu.store import store_rows
from tir_schedules.macro import macro

CHUNK = 128
DEPTH = 8  # chunks that are unpacked at a time: 32 columns of them are 32 KiB, two thirds of a 48 KiB L1
UNROLL = 4
FRACTION = 256  # factors are 8.8 fixed point: the byte is the upper half of a 16-bit product


def gemm_fits(w: Packed, dot: Dot) -> bool:
    """True for 4-bit weights in groups of 32 with whole chunks; AVX2's product of pairs would overflow."""
    return w.bits == 4 and w.group_size == 32 and w.groups > 1 and w.k % CHUNK == 0 and dot.kind != "avx2"


def alternating(lanes: int) -> list[int]:
    """The lanes of two vectors by turns."""
    return [lane + lanes * which for lane in range(lanes) for which in range(2)]


def upper_bytes(even: tirx.PrimExpr, odd: tirx.PrimExpr, dot: Dot) -> tirx.PrimExpr:
    """The upper bytes of int16 numbers as uint32[lanes], those of `even` in the lower halves of 16 bits."""
    if dot.kind.startswith("neon"):  # one trn2
        width = 4 * dot.lanes
        bytes_ = [T.reinterpret(x, dtype=f"int8x{width}") for x in (even, odd)]
        taken = [i + which * width for i in range(1, width, 2) for which in range(2)]
        return T.reinterpret(tirx.Shuffle(bytes_, taken), dtype=f"uint32x{dot.lanes}")
    even, odd = (T.reinterpret(x, dtype=f"uint32x{dot.lanes}") for x in (even, odd))
    return T.bitwise_or(
        T.bitwise_and(
            T.shift_right(even, T.broadcast(T.uint32(8), dot.lanes)), T.broadcast(T.uint32(0x00FF00FF), dot.lanes)
        ),
        T.bitwise_and(odd, T.broadcast(T.uint32(0xFF00FF00), dot.lanes)),
    )


@macro
def put_halves(bytes_, half, i, b, v, lanes, side):
    """Eight bytes of `lanes` rows, the v-th of a block, from half[2, lanes] -> bytes_[2 * i : 2 * i + 2, b], or with
    both words of a row side by side bytes_[i, b].
    """
    if side == 1:
        for h in T.unroll(2):
            bytes_[i * 2 + h, b, T.ramp(v * lanes, 1, lanes)] = half[h, T.ramp(0, 1, lanes)]
    else:
        bytes_[i, b, T.ramp(v * 2 * lanes, 1, 2 * lanes)] = tirx.Shuffle(
            [half[0, T.ramp(0, 1, lanes)], half[1, T.ramp(0, 1, lanes)]], alternating(lanes)
        )


@macro
def requantize(W, S, bytes_, chunk_scales, block, b, chunk, slot, w, dot, side=1):
    """Chunk `chunk` of a block of 16 rows -> bytes_[32 * slot : 32 * slot + 32, b], four a word, and its scales.

    With a `side` of 2 two words of a row lie side by side: bytes_[16 * slot : 16 * slot + 16, b].
    """
    lanes, per_block = T.meta_var((dot.lanes, 16 // dot.lanes))
    scale = T.alloc_buffer((4, dot.lanes), "float32")
    top = T.alloc_buffer((2, dot.lanes), "float32")
    factor = T.alloc_buffer((2, dot.lanes), "int32")
    word = T.alloc_buffer((1, dot.lanes), "uint32")
    product = T.alloc_buffer((4, 2 * dot.lanes), "int16")
    half = T.alloc_buffer((2, dot.lanes), "uint32")
    for v in T.unroll(per_block):
        for g in T.unroll(4):
            scale[g, T.ramp(0, 1, lanes)] = T.cast(
                S[block, chunk * 4 + g, T.ramp(v * lanes, 1, lanes)], f"float32x{dot.lanes}"
            )
        top[0, T.ramp(0, 1, lanes)] = T.max(
            T.max(scale[0, T.ramp(0, 1, lanes)], scale[1, T.ramp(0, 1, lanes)]),
            T.max(scale[2, T.ramp(0, 1, lanes)], scale[3, T.ramp(0, 1, lanes)]),
        )
        chunk_scales[slot, b, T.ramp(v * lanes, 1, lanes)] = top[0, T.ramp(0, 1, lanes)] * T.broadcast(
            T.float32(w.zero_point / 127), lanes
        )
        top[1, T.ramp(0, 1, lanes)] = T.Select(
            top[0, T.ramp(0, 1, lanes)] > T.broadcast(T.float32(0), lanes),
            T.broadcast(T.float32(FRACTION * 127 / w.zero_point), lanes) / top[0, T.ramp(0, 1, lanes)],
            T.broadcast(T.float32(0), lanes),
        )
        for g in T.unroll(4):
            # In 16 bits, modulo 2**16: code * factor + (half + offset - zero_point * factor), in both halves of a lane.
            factor[0, T.ramp(0, 1, lanes)] = T.cast(
                T.nearbyint(scale[g, T.ramp(0, 1, lanes)] * top[1, T.ramp(0, 1, lanes)]), f"int32x{dot.lanes}"
            )
            factor[1, T.ramp(0, 1, lanes)] = T.bitwise_and(
                T.broadcast(T.int32(FRACTION // 2 + FRACTION * dot.byte_offset), lanes)
                - factor[0, T.ramp(0, 1, lanes)] * T.broadcast(T.int32(w.zero_point), lanes),
                T.broadcast(T.int32(0xFFFF), lanes),
            )
            for i in T.unroll(2):
                factor[i, T.ramp(0, 1, lanes)] = T.bitwise_or(
                    factor[i, T.ramp(0, 1, lanes)],
                    T.shift_left(factor[i, T.ramp(0, 1, lanes)], T.broadcast(T.int32(16), lanes)),
                )
            for j in T.unroll(4):
                word[0, T.ramp(0, 1, lanes)] = W[block, (chunk * 4 + g) * 4 + j, T.ramp(v * lanes, 1, lanes)]
                for i in T.unroll(4):  # codes i and i + 4
                    product[i, T.ramp(0, 1, 2 * lanes)] = T.reinterpret(
                        T.bitwise_and(
                            T.shift_right(word[0, T.ramp(0, 1, lanes)], T.broadcast(T.cast(4 * i, "uint32"), lanes)),
                            T.broadcast(T.uint32(0x000F000F), lanes),
                        ),
                        dtype=f"int16x{2 * dot.lanes}",
                    ) * T.reinterpret(factor[0, T.ramp(0, 1, lanes)], dtype=f"int16x{2 * dot.lanes}") + T.reinterpret(
                        factor[1, T.ramp(0, 1, lanes)], dtype=f"int16x{2 * dot.lanes}"
                    )
                for h in T.unroll(2):
                    half[h, T.ramp(0, 1, lanes)] = upper_bytes(
                        product[h * 2, T.ramp(0, 1, 2 * lanes)], product[h * 2 + 1, T.ramp(0, 1, 2 * lanes)], dot
                    )
                put_halves(bytes_, half, slot * 16 + g * 4 + j, b, v, lanes, side)


@macro
def gemm_tile(panels, bytes_, chunk_scales, Y, panel, row, m, block, first, chunks, rows, blocks, n, dot):
    """Y[row : row + rows, 16 * block :] (+)= the products of `chunks` chunks from chunk `first` on."""
    Q, scales, corrections = T.meta_var(panels)
    lanes, per_block, vectors = T.meta_var((dot.lanes, 16 // dot.lanes, blocks * (16 // dot.lanes)))
    total = T.alloc_buffer((rows * blocks * (16 // dot.lanes), dot.lanes), "float32")
    acc = T.alloc_buffer((rows * blocks * (16 // dot.lanes), dot.lanes), "int32")
    word = T.alloc_buffer((blocks * (16 // dot.lanes), dot.lanes), "uint32")
    for i in T.unroll(rows * vectors):
        total[i, T.ramp(0, 1, lanes)] = T.broadcast(T.float32(0), lanes)
    for c in T.serial(chunks):
        for r in T.unroll(rows):
            for v in T.unroll(vectors):
                acc[r * vectors + v, T.ramp(0, 1, lanes)] = T.broadcast(corrections[panel, first + c, r], lanes)
        for k_outer in T.serial(CHUNK // 4 // UNROLL):
            for k_inner in T.unroll(UNROLL):
                k = T.meta_var(k_outer * UNROLL + k_inner)
                for v in T.unroll(vectors):
                    word[v, T.ramp(0, 1, lanes)] = bytes_[
                        c * 32 + k, v // per_block, T.ramp(v % per_block * lanes, 1, lanes)
                    ]
                for r in T.unroll(rows):
                    for v in T.unroll(vectors):
                        acc[r * vectors + v, T.ramp(0, 1, lanes)] = dot(
                            acc[r * vectors + v, T.ramp(0, 1, lanes)],
                            T.reinterpret(word[v, T.ramp(0, 1, lanes)], dtype=f"int8x{4 * dot.lanes}"),
                            Q[panel, (first + c) * 32 + k, r],
                            4,
                        )
        for r in T.unroll(rows):
            for v in T.unroll(vectors):
                total[r * vectors + v, T.ramp(0, 1, lanes)] = total[r * vectors + v, T.ramp(0, 1, lanes)] + T.cast(
                    acc[r * vectors + v, T.ramp(0, 1, lanes)], f"float32x{dot.lanes}"
                ) * (
                    chunk_scales[c, v // per_block, T.ramp(v % per_block * lanes, 1, lanes)]
                    * T.broadcast(scales[panel, first + c, r], lanes)
                )
    store_rows(Y, total, row, m, block, rows, blocks, n, dot.lanes, first > 0)


@macro
def gemm(X, W, S, Y, m, w, dot, tile, groups):
    """y = x W^T: per column tile and DEPTH chunks, bytes once, then all panels."""
    rows, tail_rows, blocks, chunks = T.meta_var((tile.rows, tile.tail_rows, tile.blocks, groups.count))
    Q = T.alloc_buffer(((m + tile.tail_rows - 1) // tile.tail_rows, groups.words, tile.rows), "int32")
    scales = T.alloc_buffer(((m + tile.tail_rows - 1) // tile.tail_rows, groups.count, tile.rows), "float32")
    corrections = T.alloc_buffer(((m + tile.tail_rows - 1) // tile.tail_rows, groups.count, tile.rows), "int32")
    whole: T.let[T.int64] = whole_panels(m, rows, tail_rows)
    tail: T.let[T.int64] = (T.max(m - whole * rows, 0) + tail_rows - 1) // tail_rows
    quantize_panels(X, m, whole, tail, rows, tail_rows, groups, (Q, scales, corrections))
    for t in T.parallel(-(-w.blocks // tile.blocks)):
        bytes_ = T.alloc_buffer((DEPTH * 32, tile.blocks, 16), "uint32")
        chunk_scales = T.alloc_buffer((DEPTH, tile.blocks, 16), "float32")
        for d in T.serial(-(-chunks // DEPTH)):
            here = T.meta_var(T.min(DEPTH, chunks - d * DEPTH))
            for slot in T.serial(here):
                for b in T.serial(blocks):
                    block = T.meta_var(T.min(t * blocks + b, w.blocks - 1))
                    requantize(W, S, bytes_, chunk_scales, block, b, d * DEPTH + slot, slot, w, dot)
            for p in T.serial(whole):
                gemm_tile(
                    (Q, scales, corrections), bytes_, chunk_scales, Y, p, p * rows, m, t * blocks, d * DEPTH, here,
                    rows, blocks, w.n, dot,
                )  # fmt: skip
            for i in T.serial(tail):
                row = T.meta_var(whole * rows + i * tail_rows)
                gemm_tile(
                    (Q, scales, corrections), bytes_, chunk_scales, Y, whole + i, row, m, t * blocks, d * DEPTH, here,
                    tail_rows, blocks, w.n, dot,
                )  # fmt: skip
