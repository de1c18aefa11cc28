"""y = x W^T for CPUs, W packed as `rows16`: 16 rows of W are the 16 lanes of a vector.

One kernel has both shapes. With one row of x it is a GEMV that streams the packed weights once and keeps
dequantization in registers; with more it is a GEMM that dequantizes a K-chunk of 16*blocks rows into a
scratch that stays in L1, then runs a register tile of `rows` x 16*blocks over it.
Layout: `mlcpipe/quantization/layout.py`. Codes: element j of a word at bits j*bits of a uint32.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.script import tirx as T

from tir_schedules.cpu.gate import Gate, apply_gate, gate_of, ungated
from tir_schedules.macro import macro
from tir_schedules.op import Declined, Op

LANES = 16


@dataclass(frozen=True)
class Tile:
    """Register tile of the GEMM: `rows` of x by `blocks` vectors of 16 columns; `depth` of K held in scratch."""

    rows: int = 12
    blocks: int = 2
    depth: int = 256


@dataclass(frozen=True)
class Packed:
    """Facts of a packed weight [N, K]; bits 0 means plain floats of `dtype`."""

    n: int
    k: int
    bits: int
    group_size: int
    codes_per_word: int
    zero_point: int
    dtype: str

    @property
    def groups(self) -> int:
        return -(-self.k // self.group_size)

    @property
    def words_per_group(self) -> int:
        return self.group_size // self.codes_per_word

    @property
    def blocks(self) -> int:
        return -(-self.n // LANES)


def packed_of(op: Op) -> Packed:
    """The weight facts of a tagged matmul."""
    return Packed(
        n=op.int("n"),
        k=op.int("k"),
        bits=op.int("bits"),
        group_size=op.int("group_size"),
        codes_per_word=op.int("codes_per_word"),
        zero_point=op.int("zero_point"),
        dtype=op.str("dtype"),
    )


def matmul(op: Op, tile: Tile) -> tirx.PrimFunc | Declined:
    """The kernel for a tagged `matmul` or `gated_matmul`: x f32[m, K], packed W, y f32[m, N] or [m, N / 2], m >= 1."""
    if op.str("layout") != "rows16":
        return Declined(f"weight layout {op.str('layout')} has no CPU kernel")
    if tile.rows % 4:
        # The last panel is covered by tiles of 4 rows, which would read past it.
        return Declined(f"a register tile of {tile.rows} rows is not a multiple of 4")
    weight = packed_of(op)
    return (_plain if weight.bits == 0 else _quantized)(weight, tile, gate_of(op))


@macro
def _register_tile(panels, B, Y, panel, r0, k0, depth, tile_index, rows, tile, n, m, whole):
    """Y[rows from panel*tile.rows + r0, 16*blocks columns] (+)= x[those rows, k0:k0+depth] B[:depth]."""
    acc = T.alloc_buffer((rows * tile.blocks, 16), "float32")
    b_vec = T.alloc_buffer((tile.blocks, 16), "float32")
    for r in T.unroll(rows):
        for b in T.unroll(tile.blocks):
            acc[r * tile.blocks + b, T.ramp(0, 1, 16)] = T.broadcast(T.float32(0), 16)
    for k in T.serial(depth):
        for b in T.unroll(tile.blocks):
            b_vec[b, T.ramp(0, 1, 16)] = B[k, T.ramp(b * 16, 1, 16)]
        for r in T.unroll(rows):
            for b in T.unroll(tile.blocks):
                acc[r * tile.blocks + b, T.ramp(0, 1, 16)] = (
                    acc[r * tile.blocks + b, T.ramp(0, 1, 16)]
                    + T.broadcast(panels[panel, k0 + k, r0 + r], 16) * b_vec[b, T.ramp(0, 1, 16)]
                )
    for r in T.unroll(rows):
        if whole or panel * tile.rows + r0 + r < m:
            row = T.meta_var(panel * tile.rows + r0 + r)
            for b in T.unroll(tile.blocks):
                if tile_index * tile.blocks + b < n // 16:
                    column = T.meta_var((tile_index * tile.blocks + b) * 16)
                    if k0 > 0:
                        acc[r * tile.blocks + b, T.ramp(0, 1, 16)] = (
                            acc[r * tile.blocks + b, T.ramp(0, 1, 16)] + Y[row, T.ramp(column, 1, 16)]
                        )
                    Y[row, T.ramp(column, 1, 16)] = acc[r * tile.blocks + b, T.ramp(0, 1, 16)]
                else:
                    for lane in T.serial(n % 16):
                        if tile_index * tile.blocks + b == n // 16:
                            tail = T.meta_var((tile_index * tile.blocks + b) * 16 + lane)
                            if k0 > 0:
                                acc[r * tile.blocks + b, lane] = acc[r * tile.blocks + b, lane] + Y[row, tail]
                            Y[row, tail] = acc[r * tile.blocks + b, lane]


@macro
def _all_rows(panels, B, Y, m, k0, depth, tile_index, tile, n):
    """Cover m rows: whole panels with the full tile, the last one with tiles of 4 rows."""
    for panel in T.serial(m // tile.rows):
        _register_tile(panels, B, Y, panel, 0, k0, depth, tile_index, tile.rows, tile, n, m, True)
    for i in T.serial((m % tile.rows + 3) // 4):
        _register_tile(panels, B, Y, m // tile.rows, i * 4, k0, depth, tile_index, 4, tile, n, m, False)


@macro
def _pack_rows(X, panels, m, k_size, tile):
    """panels[p, k, r] = X[p * tile.rows + r, k]: what a register tile broadcasts lies in a row (no L1 aliasing)."""
    for panel in T.parallel((m + tile.rows - 1) // tile.rows):
        for r in T.serial(tile.rows):
            if panel * tile.rows + r < m:
                for k in T.serial(k_size):
                    panels[panel, k, r] = X[panel * tile.rows + r, k]
            else:
                for k in T.serial(k_size):
                    panels[panel, k, r] = T.float32(0)


@macro
def _store_row(Y, acc, block, n):
    """Y[0, 16*block:] = acc, the tail of a last block that is not whole lane by lane."""
    if block < n // 16:
        Y[0, T.ramp(block * 16, 1, 16)] = acc[0, T.ramp(0, 1, 16)]
    else:
        for lane in T.serial(n % 16):
            Y[0, block * 16 + lane] = acc[0, lane]


def _quantized(w: Packed, tile: Tile, gate: Gate | None) -> tirx.PrimFunc:
    # A scale for a whole row is read again for every 32 of it, so that what is unrolled does not grow with K.
    group = 32 if w.groups == 1 and w.group_size % 32 == 0 else w.group_size
    per_word, bits, stored_groups = w.codes_per_word, w.bits, w.groups
    words, groups = group // per_word, w.groups * w.group_size // group
    mask = (1 << bits) - 1
    padded = groups * group
    chunk_groups = max(1, tile.depth // group)
    depth = chunk_groups * group
    chunks = -(-groups // chunk_groups)
    n_tiles = -(-w.blocks // tile.blocks)
    columns = w.n if gate is None else gate.width
    n, k_size, n_blocks, blocks, rows = w.n, w.k, w.blocks, tile.blocks, tile.rows
    zero_point, dtype = float(w.zero_point), w.dtype

    @T.prim_func(s_tir=True)
    def kernel(x_handle: T.handle, w_handle: T.handle, s_handle: T.handle, y_handle: T.handle):
        m = T.int64()
        X = T.match_buffer(x_handle, (m, k_size), "float32")
        W = T.match_buffer(w_handle, (n_blocks, groups * words, 16), "uint32")
        S = T.match_buffer(s_handle, (n_blocks, stored_groups, 16), dtype)
        Z = T.match_buffer(y_handle, (m, columns), "float32")
        Y = T.meta_var(ungated(gate, Z, m))
        if m == T.int64(1):
            x = T.alloc_buffer((padded,), "float32")
            bias = T.alloc_buffer((groups,), "float32")
            s8 = T.alloc_buffer((1, 8), "float32")
            s4 = T.alloc_buffer((1, 4), "float32")
            for i in T.vectorized(k_size):
                x[i] = X[0, i]
            for i in T.serial(padded - k_size):
                x[k_size + i] = T.float32(0)
            for g in T.serial(groups):
                s8[0, T.ramp(0, 1, 8)] = x[T.ramp(g * group, 1, 8)]
                for i in T.unroll(group // 8 - 1):
                    s8[0, T.ramp(0, 1, 8)] = s8[0, T.ramp(0, 1, 8)] + x[T.ramp(g * group + i * 8 + 8, 1, 8)]
                s4[0, T.ramp(0, 1, 4)] = T.vectorlow("float32x4", s8[0, T.ramp(0, 1, 8)]) + T.vectorhigh(
                    "float32x4", s8[0, T.ramp(0, 1, 8)]
                )
                bias[g] = (s4[0, 0] + s4[0, 1] + s4[0, 2] + s4[0, 3]) * T.float32(-zero_point)
            for block in T.parallel(n_blocks):
                acc = T.alloc_buffer((1, 16), "float32")
                part = T.alloc_buffer((4, 16), "float32")
                word = T.alloc_buffer((1, 16), "uint32")
                acc[0, T.ramp(0, 1, 16)] = T.broadcast(T.float32(0), 16)
                for g in T.serial(groups):
                    part[0, T.ramp(0, 1, 16)] = T.broadcast(bias[g], 16)
                    for i in T.unroll(3):
                        part[i + 1, T.ramp(0, 1, 16)] = T.broadcast(T.float32(0), 16)
                    for j in T.unroll(words):
                        word[0, T.ramp(0, 1, 16)] = W[block, g * words + j, T.ramp(0, 1, 16)]
                        for i in T.unroll(per_word):
                            part[i % 4, T.ramp(0, 1, 16)] = part[i % 4, T.ramp(0, 1, 16)] + T.cast(
                                T.cast(
                                    T.bitwise_and(
                                        T.shift_right(
                                            word[0, T.ramp(0, 1, 16)], T.broadcast(T.cast(i * bits, "uint32"), 16)
                                        ),
                                        T.broadcast(T.uint32(mask), 16),
                                    ),
                                    "int32x16",
                                ),
                                "float32x16",
                            ) * T.broadcast(x[g * group + j * per_word + i], 16)
                    acc[0, T.ramp(0, 1, 16)] = acc[0, T.ramp(0, 1, 16)] + (
                        (part[0, T.ramp(0, 1, 16)] + part[1, T.ramp(0, 1, 16)])
                        + (part[2, T.ramp(0, 1, 16)] + part[3, T.ramp(0, 1, 16)])
                    ) * T.cast(S[block, T.min(g, stored_groups - 1), T.ramp(0, 1, 16)], "float32x16")
                _store_row(Y, acc, block, n)
            apply_gate(gate, Y, Z, 1)
        else:
            panels = T.alloc_buffer(((m + rows - 1) // rows, k_size, rows), "float32")
            _pack_rows(X, panels, m, k_size, tile)
            for t in T.parallel(n_tiles):
                B = T.alloc_buffer((depth, blocks * 16), "float32")
                scale = T.alloc_buffer((1, 16), "float32")
                word = T.alloc_buffer((1, 16), "uint32")
                for c in T.serial(chunks):
                    for b in T.serial(blocks):
                        for g in T.serial(T.min(chunk_groups, groups - c * chunk_groups)):
                            block = T.meta_var(T.min(t * blocks + b, n_blocks - 1))
                            scale[0, T.ramp(0, 1, 16)] = T.cast(
                                S[block, T.min(c * chunk_groups + g, stored_groups - 1), T.ramp(0, 1, 16)], "float32x16"
                            )
                            for j in T.unroll(words):
                                word[0, T.ramp(0, 1, 16)] = W[
                                    block, (c * chunk_groups + g) * words + j, T.ramp(0, 1, 16)
                                ]
                                for i in T.unroll(per_word):
                                    B[g * group + j * per_word + i, T.ramp(b * 16, 1, 16)] = (
                                        T.cast(
                                            T.cast(
                                                T.bitwise_and(
                                                    T.shift_right(
                                                        word[0, T.ramp(0, 1, 16)],
                                                        T.broadcast(T.cast(i * bits, "uint32"), 16),
                                                    ),
                                                    T.broadcast(T.uint32(mask), 16),
                                                ),
                                                "int32x16",
                                            ),
                                            "float32x16",
                                        )
                                        - T.broadcast(T.float32(zero_point), 16)
                                    ) * scale[0, T.ramp(0, 1, 16)]
                    _all_rows(panels, B, Y, m, c * depth, T.min(depth, k_size - c * depth), t, tile, n)
            apply_gate(gate, Y, Z, m)

    return kernel


def _plain(w: Packed, tile: Tile, gate: Gate | None) -> tirx.PrimFunc:
    depth = tile.depth
    chunks = -(-w.k // depth)
    n_tiles = -(-w.blocks // tile.blocks)
    columns = w.n if gate is None else gate.width
    n, k_size, n_blocks, blocks, rows, dtype = w.n, w.k, w.blocks, tile.blocks, tile.rows, w.dtype

    @T.prim_func(s_tir=True)
    def kernel(x_handle: T.handle, w_handle: T.handle, y_handle: T.handle):
        m = T.int64()
        X = T.match_buffer(x_handle, (m, k_size), "float32")
        W = T.match_buffer(w_handle, (n_blocks, k_size, 16), dtype)
        Z = T.match_buffer(y_handle, (m, columns), "float32")
        Y = T.meta_var(ungated(gate, Z, m))
        if m == T.int64(1):
            for block in T.parallel(n_blocks):
                acc = T.alloc_buffer((1, 16), "float32")
                part = T.alloc_buffer((8, 16), "float32")
                for i in T.unroll(8):
                    part[i, T.ramp(0, 1, 16)] = T.broadcast(T.float32(0), 16)
                for k in T.serial(k_size // 8):
                    for i in T.unroll(8):
                        part[i, T.ramp(0, 1, 16)] = part[i, T.ramp(0, 1, 16)] + T.cast(
                            W[block, k * 8 + i, T.ramp(0, 1, 16)], "float32x16"
                        ) * T.broadcast(X[0, k * 8 + i], 16)
                for k in T.serial(k_size % 8):
                    part[0, T.ramp(0, 1, 16)] = part[0, T.ramp(0, 1, 16)] + T.cast(
                        W[block, k_size // 8 * 8 + k, T.ramp(0, 1, 16)], "float32x16"
                    ) * T.broadcast(X[0, k_size // 8 * 8 + k], 16)
                acc[0, T.ramp(0, 1, 16)] = (
                    (part[0, T.ramp(0, 1, 16)] + part[1, T.ramp(0, 1, 16)])
                    + (part[2, T.ramp(0, 1, 16)] + part[3, T.ramp(0, 1, 16)])
                ) + (
                    (part[4, T.ramp(0, 1, 16)] + part[5, T.ramp(0, 1, 16)])
                    + (part[6, T.ramp(0, 1, 16)] + part[7, T.ramp(0, 1, 16)])
                )
                _store_row(Y, acc, block, n)
            apply_gate(gate, Y, Z, 1)
        else:
            panels = T.alloc_buffer(((m + rows - 1) // rows, k_size, rows), "float32")
            _pack_rows(X, panels, m, k_size, tile)
            for t in T.parallel(n_tiles):
                B = T.alloc_buffer((depth, blocks * 16), "float32")
                for c in T.serial(chunks):
                    for b in T.serial(blocks):
                        for k in T.serial(T.min(depth, k_size - c * depth)):
                            B[k, T.ramp(b * 16, 1, 16)] = T.cast(
                                W[T.min(t * blocks + b, n_blocks - 1), c * depth + k, T.ramp(0, 1, 16)], "float32x16"
                            )
                    _all_rows(panels, B, Y, m, c * depth, T.min(depth, k_size - c * depth), t, tile, n)
            apply_gate(gate, Y, Z, m)

    return kernel
