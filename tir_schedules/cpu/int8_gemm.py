"""Many rows times a 4-bit weight: codes become bytes once for all rows, on one scale for 256 or 128 of a row.

In a chunk of 256 with group scales s the byte of code c is round((c - zero_point) * s / t) for a step
t = max(s) * zero_point / 127. That moves a weight by about t / 2 = max(s) / 36 (zero_point 7), an eighteenth of what
4-bit rounding did, and a sum of 256 products stays in integers: 97 of 100 operations of the units that multiply are
dot products, against 94 with chunks of 128 and 80 with scales for every 32. Activations have one scale for the same
numbers of a row.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import tirx as I

from tir_schedules.cpu.gate import gate_row
from tir_schedules.cpu.int8_activations import quantize_panels, whole_panels
from tir_schedules.cpu.int8_dot import Dot
from tir_schedules.cpu.matmul import Packed
from tir_schedules.cpu.store import store_rows
from tir_schedules.cpu.vectors import Buffer, Expr, prefetch, value
from tir_schedules.macro import macro

GROUP = 32  # of weights
CHUNK, LARGE_CHUNK = 128, 256  # of K on one scale
# Unless a record says otherwise: of K that is unpacked at a time, 32 columns are 32 KiB, two thirds of a 48 KiB L1;
# words of it that go through the inner loop at once.
DEPTH, UNROLL = 1024, 4
FRACTION = 256  # factors are 8.8 fixed point: the byte is the upper half of a 16-bit product


def gemm_fits(w: Packed, dot: Dot) -> bool:
    """True for 4-bit weights in groups of 32 with whole chunks; AVX2's product of pairs would overflow."""
    return w.bits == 4 and w.group_size == GROUP and w.groups > 1 and w.k % CHUNK == 0 and dot.kind != "avx2"


def chunk_of(w: Packed, dot: Dot) -> int:
    """How much of K `gemm` takes on one scale, 0 where it does not fit."""
    return 0 if not gemm_fits(w, dot) else LARGE_CHUNK if w.k % LARGE_CHUNK == 0 else CHUNK


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
def requantize(W, S, bytes_, chunk_scales, block, b, chunk, slot, w, dot, side=1, size=CHUNK):
    """Chunk `chunk` of a block of 16 rows -> size / 4 words bytes_[size / 4 * slot :, b] of four bytes, and its scales.

    With a `side` of 2 two words of a row lie side by side: size / 8 of bytes_[size / 8 * slot :, b].
    """
    lanes, per_block, groups = T.meta_var((dot.lanes, 16 // dot.lanes, size // GROUP))
    scale = T.alloc_buffer((size // GROUP, dot.lanes), "float32")
    top = T.alloc_buffer((2, dot.lanes), "float32")
    factor = T.alloc_buffer((2, dot.lanes), "int32")
    word = T.alloc_buffer((1, dot.lanes), "uint32")
    product = T.alloc_buffer((4, 2 * dot.lanes), "int16")
    half = T.alloc_buffer((2, dot.lanes), "uint32")
    for v in T.unroll(per_block):
        for g in T.unroll(groups):
            scale[g, T.ramp(0, 1, lanes)] = T.cast(
                S[block, chunk * groups + g, T.ramp(v * lanes, 1, lanes)], f"float32x{dot.lanes}"
            )
        top[0, T.ramp(0, 1, lanes)] = scale[0, T.ramp(0, 1, lanes)]
        for g in T.unroll(groups - 1):
            top[0, T.ramp(0, 1, lanes)] = T.max(top[0, T.ramp(0, 1, lanes)], scale[g + 1, T.ramp(0, 1, lanes)])
        chunk_scales[slot, b, T.ramp(v * lanes, 1, lanes)] = top[0, T.ramp(0, 1, lanes)] * T.broadcast(
            T.float32(w.zero_point / 127), lanes
        )
        top[1, T.ramp(0, 1, lanes)] = T.Select(
            top[0, T.ramp(0, 1, lanes)] > T.broadcast(T.float32(0), lanes),
            T.broadcast(T.float32(FRACTION * 127 / w.zero_point), lanes) / top[0, T.ramp(0, 1, lanes)],
            T.broadcast(T.float32(0), lanes),
        )
        for g in T.unroll(groups):
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
                word[0, T.ramp(0, 1, lanes)] = W[block, (chunk * groups + g) * 4 + j, T.ramp(v * lanes, 1, lanes)]
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
                put_halves(bytes_, half, slot * (size // 8) + g * 4 + j, b, v, lanes, side)


@macro
def gemm_tile(panels, bytes_, chunk_scales, Y, panel, row, m, block, first, chunks, size, rows, blocks, n, dot, unroll):
    """Y[row : row + rows, 16 * block :] (+)= the products of `chunks` chunks of `size` from `first` on."""
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
        for k_outer in T.serial(size // 4 // unroll):
            for k_inner in T.unroll(unroll):
                k = T.meta_var(k_outer * unroll + k_inner)
                for v in T.unroll(vectors):
                    word[v, T.ramp(0, 1, lanes)] = bytes_[
                        c * (size // 4) + k, v // per_block, T.ramp(v % per_block * lanes, 1, lanes)
                    ]
                for r in T.unroll(rows):
                    for v in T.unroll(vectors):
                        acc[r * vectors + v, T.ramp(0, 1, lanes)] = dot(
                            acc[r * vectors + v, T.ramp(0, 1, lanes)],
                            T.reinterpret(word[v, T.ramp(0, 1, lanes)], dtype=f"int8x{4 * dot.lanes}"),
                            Q[panel, (first + c) * (size // 4) + k, r],
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


def ask_for_next(
    W: Buffer, block: Expr, word: Expr, words: int, blocks: int, p: Expr, parts: Expr, depth: int
) -> None:
    """Emit prefetches of part p of `parts` of the codes that come next: `depth` words from `word` on of the same
    blocks, or the first of the blocks after them.
    """
    more = value(word < words)
    first_block, first_word = value(I.Select(more, block, block + blocks)), value(I.Select(more, word, 0))
    share = value((blocks * depth + parts - 1) // parts)
    with I.serial(0, share) as i:
        line = value(p * share + i)
        prefetch(W, (first_block + line // depth, first_word + line % depth, 0))


@macro
def columns(panels, W, S, Y, row0, rows_of, first_block, block, bytes_, chunk_scales, w, dot, tile, groups):
    """Y[row0 + row, 16 * block :] of all rows = x times the weights of `tile.blocks` blocks from `first_block` on.

    Per `tile.depth` of K bytes once, then all panels. `rows_of`: how many rows, whole panels and tail panels there are.
    """
    m, whole, tail = T.meta_var(rows_of)
    rows, tail_rows, blocks, n = T.meta_var((tile.rows, tile.tail_rows, tile.blocks, int(Y.shape[1])))
    size, depth, unroll = T.meta_var((groups.size, tile.depth // groups.size, tile.unroll))
    for d in T.serial(-(-groups.count // depth)):
        here = T.meta_var(T.min(depth, groups.count - d * depth))
        for slot in T.serial(here):
            for b in T.serial(blocks):
                stored = T.meta_var(T.min(first_block + b, w.blocks - 1))
                requantize(W, S, bytes_, chunk_scales, stored, b, d * depth + slot, slot, w, dot, 1, size)
        for p in T.serial(whole):
            ask_for_next(W, first_block, (d + 1) * (tile.depth // 8), w.k // 8, blocks, p, whole, tile.depth // 8)
            gemm_tile(
                panels, bytes_, chunk_scales, Y, p, row0 + p * rows, row0 + m, block, d * depth, here, size, rows,
                blocks, n, dot, unroll,
            )  # fmt: skip
        for i in T.serial(tail):
            row = T.meta_var(whole * rows + i * tail_rows)
            gemm_tile(
                panels, bytes_, chunk_scales, Y, whole + i, row0 + row, row0 + m, block, d * depth, here, size,
                tail_rows, blocks, n, dot, unroll,
            )  # fmt: skip


@macro
def gemm(X, W, S, Y, m, w, dot, tile, groups, gate):
    """y = x W^T, or act(gate) * up of it, in parallel over column tiles."""
    rows, tail_rows, blocks = T.meta_var((tile.rows, tile.tail_rows, tile.blocks))
    Q = T.alloc_buffer(((m + tile.tail_rows - 1) // tile.tail_rows, groups.words, tile.rows), "int32")
    scales = T.alloc_buffer(((m + tile.tail_rows - 1) // tile.tail_rows, groups.count, tile.rows), "float32")
    corrections = T.alloc_buffer(((m + tile.tail_rows - 1) // tile.tail_rows, groups.count, tile.rows), "int32")
    whole: T.let[T.int64] = whole_panels(m, rows, tail_rows)
    tail: T.let[T.int64] = (T.max(m - whole * rows, 0) + tail_rows - 1) // tail_rows
    quantize_panels(X, m, whole, tail, rows, tail_rows, groups, (Q, scales, corrections))
    for t in T.parallel(-(-w.blocks // (tile.blocks if gate is None else 2 * tile.blocks))):
        bytes_ = T.alloc_buffer((tile.depth // 4, tile.blocks, 16), "uint32")
        chunk_scales = T.alloc_buffer((tile.depth // groups.size, tile.blocks, 16), "float32")
        if gate is None:
            columns(
                (Q, scales, corrections), W, S, Y, 0, (m, whole, tail), t * blocks, t * blocks, bytes_, chunk_scales,
                w, dot, tile, groups,
            )  # fmt: skip
        else:
            # What this thread needs of both halves stays in its L2.
            halves = T.alloc_buffer((2 * m, 16 * tile.blocks), "float32")
            for half in T.serial(2):
                first_block = T.meta_var(half * (w.blocks // 2) + t * blocks)
                columns(
                    (Q, scales, corrections), W, S, halves, half * m, (m, whole, tail), first_block, 0, bytes_,
                    chunk_scales, w, dot, tile, groups,
                )  # fmt: skip
            for row in T.serial(m):
                for b in T.serial(T.min(blocks, gate.width // 16 - t * blocks)):
                    gate_row(
                        gate, (halves, row, b * 16), (halves, m + row, b * 16), (Y, row, (t * blocks + b) * 16), 16
                    )
