"""Prefill rows times a 4-bit weight: codes become bytes once for all rows, on one scale for 256 or 128 of a row.

In a chunk of 256 with group scales s the byte of code c is round((c - zero_point) * s / t) for a step t = max|s| * 8 /
127, as a code is at most 8 from a zero point of 7 or 8. That moves a weight by about t / 2 = max|s| / 32, a sixteenth
of what 4-bit rounding did, and a sum of 256 products stays in integers: 97 of 100 operations of the units that
multiply are dot products, against 94 with chunks of 128 and 80 with scales for every 32. Activations have one scale
for the same numbers of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr
from tir_schedules.cpu.gate import Gate, gate_row
from tir_schedules.cpu.int8_activations import Cover, Groups, Panels, quantize_rows
from tir_schedules.cpu.int8_blocks import requantize_blocks
from tir_schedules.cpu.int8_dot import Dot, Weight
from tir_schedules.cpu.int8_unpacked import FRACTION, GROUP, Bytes, Unpacked, halves, upper_bytes
from tir_schedules.cpu.packed_weight import Packed
from tir_schedules.cpu.store import Output
from tir_schedules.cpu.vectors import Registers, load, prefetch, read, splat, store, value

CHUNK, LARGE_CHUNK = 128, 256  # of K on one scale
# Unless a record says otherwise: of K that is unpacked at a time, 32 columns are 16 KiB, beside 8 KiB of the next ones;
# words of it that go through the inner loop at once.
DEPTH, UNROLL = 512, 4


@dataclass(frozen=True)
class Int8Tile:
    """Register tile: `rows` of x (or `tail_rows` where that wastes less) by `blocks` of 16 columns.

    `depth` of K is unpacked at a time where there are many rows, `unroll` words of it go through the loop at once.
    """

    rows: int
    tail_rows: int
    blocks: int
    depth: int = DEPTH
    unroll: int = UNROLL


def gemm_fits(w: Packed, dot: Dot) -> bool:
    """True for 4-bit weights in groups of 32, and for blocks of fewer than 8 bits, in whole chunks; not for AVX2."""
    fits = (w.blocked and w.bits < 8) or (w.bits == 4 and w.group_size == GROUP and w.groups > 1)
    return fits and w.k % CHUNK == 0 and dot.kind != "avx2"


def chunk_of(w: Packed, dot: Dot) -> int:
    """How much of K `gemm` takes on one scale, 0 where it does not fit."""
    return 0 if not gemm_fits(w, dot) else LARGE_CHUNK if w.k % LARGE_CHUNK == 0 else CHUNK


def requantize(
    weight: Weight,
    block: Expr,
    chunk: Expr,
    out: Bytes,
    slot: Expr,
    b: Expr,
    ask: Callable[[Expr], None] = lambda group: None,
) -> None:
    """Emit a chunk of a block of 16 rows -> a slot of block `b` of `out`, and its scales.

    `ask(group)` emits prefetches of what comes after, for a group of the chunk.
    """
    if weight.packed.blocked:
        return requantize_blocks(weight, block, chunk, out, slot, b, ask)
    lanes, groups = weight.dot.lanes, out.size // GROUP
    scale, top = Registers(groups, lanes), Registers(2, lanes)
    furthest = max(weight.packed.zero_point, weight.packed.highest - weight.packed.zero_point)
    factor, word = Registers(2, lanes, "int32"), Registers(1, lanes, "uint32")
    product, half = Registers(4, 2 * lanes, "int16"), Registers(2, lanes, "uint32")
    zero = splat(0.0, lanes)
    with I.unroll(16 // lanes) as v:
        # Step 1: the scale of the chunk, and in top[1] what makes factors of the scales of its groups.
        with I.unroll(groups) as g:
            scale[g] = load(weight.scales, (block, chunk * groups + g, v * lanes), lanes)
        top[0] = I.abs(scale[0])
        with I.unroll(groups - 1) as g:
            top[0] = I.max(top[0], I.abs(scale[g + 1]))
        store(out.scales, (slot, b, v * lanes), top[0] * splat(furthest / 127, lanes), lanes)
        inverse = splat(FRACTION * 127 / furthest, lanes) / top[0]
        top[1] = I.Select(top[0] > zero, inverse, zero)
        with I.unroll(groups) as g:
            ask(g)
            _set_factors(weight, scale[g] * top[1], factor)
            with I.unroll(4) as j:
                # Step 2: bytes of eight codes; a product has codes i and i + 4.
                word[0] = read(weight.words, (block, (chunk * groups + g) * 4 + j, v * lanes), lanes)
                with I.unroll(4) as i:
                    shifted = I.shift_right(word[0], splat(I.cast(4 * i, "uint32"), lanes))
                    codes = halves(I.bitwise_and(shifted, splat(I.uint32(0x000F000F), lanes)), lanes)
                    product[i] = codes * halves(factor[0], lanes) + halves(factor[1], lanes)
                with I.unroll(2) as h:
                    half[h] = upper_bytes(product[h * 2], product[h * 2 + 1], weight.dot)
                out.put_eight(slot * (out.size // 8) + g * 4 + j, b, v, half)


def _set_factors(weight: Weight, ratio: Expr, factor: Registers) -> None:
    """Emit factor[0], factor[1] so that code * factor[0] + factor[1] is a byte in 8.8 fixed point.

    In 16 bits, modulo 2**16, in both halves of a lane: factor[1] = half + offset - zero_point * factor[0].
    """
    lanes, dot = weight.dot.lanes, weight.dot
    factor[0] = I.cast(I.nearbyint(ratio), f"int32x{lanes}")
    offset = splat(I.int32(FRACTION // 2 + FRACTION * dot.byte_offset), lanes)
    shifted = offset - factor[0] * splat(I.int32(weight.packed.zero_point), lanes)
    factor[1] = I.bitwise_and(shifted, splat(I.int32(0xFFFF), lanes))
    factor[0] = I.bitwise_and(factor[0], splat(I.int32(0xFFFF), lanes))
    with I.unroll(2) as i:
        factor[i] = I.bitwise_or(factor[i], I.shift_left(factor[i], splat(I.int32(16), lanes)))


def gemm_tile(
    panels: Panels, panel: Expr, columns: Unpacked, first: Expr, count: Expr, out: Output, dot: Dot, unroll: int
) -> None:
    """Emit y (+)= a panel times `count` unpacked chunks, `first` and those after it."""
    lanes, per_block = dot.lanes, 16 // dot.lanes
    rows, vectors, words = out.rows, out.blocks * per_block, columns.size // 4
    total, acc = Registers(rows * vectors, lanes), Registers(rows * vectors, lanes, "int32")
    word = Registers(vectors, lanes, "uint32")
    with I.unroll(rows * vectors) as i:
        total[i] = splat(0.0, lanes)
    with I.serial(count) as c:
        with I.unroll(rows) as r, I.unroll(vectors) as v:
            acc[r * vectors + v] = splat(panels.corrections[panel, first + c, r], lanes)
        with I.serial(words // unroll) as k_outer, I.unroll(unroll) as k_inner:
            k = k_outer * unroll + k_inner
            with I.unroll(vectors) as v:
                word[v] = read(columns.words, (c * words + k, v // per_block, v % per_block * lanes), lanes)
            with I.unroll(rows) as r, I.unroll(vectors) as v:
                bytes_ = I.reinterpret(f"int8x{4 * lanes}", word[v])
                x = panels.words[panel, (first + c) * words + k, r]
                acc[r * vectors + v] = dot(acc[r * vectors + v], bytes_, x, 4)
        with I.unroll(rows) as r, I.unroll(vectors) as v:
            scale = read(columns.scales, (c, v // per_block, v % per_block * lanes), lanes)
            scale = scale * splat(panels.scales[panel, first + c, r], lanes)
            total[r * vectors + v] = total[r * vectors + v] + I.cast(acc[r * vectors + v], f"float32x{lanes}") * scale
    out.store(total)


@dataclass(frozen=True)
class _Next:
    """Where codes and scales come from after those that are unpacked: `depth` of K further in the same `blocks`, or
    the first of the blocks after them.
    """

    weight: Weight
    block: Expr
    first: Expr
    depth: int
    blocks: int

    @classmethod
    def after(cls, weight: Weight, block: Expr, first: Expr, depth: int, blocks: int) -> _Next:
        """What comes after `depth` of K from `first` on of `blocks` blocks."""
        more = value(first + depth < weight.packed.k)
        return cls(
            weight, value(I.Select(more, block, block + blocks)), value(I.Select(more, first + depth, 0)), depth, blocks
        )

    def ask_group(self, b: Expr, k: Expr) -> None:
        """Emit prefetches of the group at `k` of block b, and of its scales."""
        packed, run = self.weight.packed, (self.first + k) // GROUP
        first = run * packed.bits if packed.blocked else (self.first + k) // 8
        with I.unroll(packed.bits) as i:
            prefetch(self.weight.words, (self.block + b, first + i, 0))
        self.weight.ask_scales(self.block + b, run)


@dataclass(frozen=True)
class _Gemm:
    """All rows of x, quantized, and what a thread has for some columns of the weight."""

    weight: Weight
    tile: Int8Tile
    cover: Cover
    panels: Panels
    columns: Unpacked

    def multiply(self, first_block: Expr, y: Buffer, block: Expr, first_row: Expr = 0) -> None:
        """Emit y[first_row :, 16 * block :] = x times the weights of `tile.blocks` blocks from `first_block` on.

        Per `tile.depth` of K bytes once, then all panels.
        """
        tile, cover, packed = self.tile, self.cover, self.weight.packed
        chunks, depth = self.panels.groups.count, tile.depth // self.columns.size
        with I.serial(-(-chunks // depth)) as d:
            first, count = d * depth, I.min(depth, chunks - d * depth)

            def multiply(panel: Expr, row: Expr, rows: int, first: Expr = first, count: Expr = count) -> None:
                out = Output(y, row, first_row + cover.m, block, rows, tile.blocks, first > 0)
                gemm_tile(self.panels, panel, self.columns, first, count, out, self.weight.dot, tile.unroll)

            size = self.columns.size
            coming = _Next.after(self.weight, first_block, first * size, tile.depth, tile.blocks)
            with I.serial(count) as slot, I.serial(tile.blocks) as b:

                def ask(g: Expr, slot: Expr = slot, b: Expr = b, coming: _Next = coming) -> None:
                    coming.ask_group(b, slot * size + g * GROUP)

                stored = I.min(first_block + b, packed.blocks - 1)
                requantize(self.weight, stored, first + slot, self.columns, slot, b, ask)
            with I.serial(cover.whole) as p:
                multiply(p, first_row + p * tile.rows, tile.rows)
            with I.serial(cover.tail) as i:
                row = cover.whole * tile.rows + i * tile.tail_rows
                multiply(cover.whole + i, first_row + row, tile.tail_rows)


def gemm(X: Buffer, weight: Weight, Y: Buffer, m: Expr, tile: Int8Tile, groups: Groups, gate: Gate | None) -> None:
    """Emit y = x W^T, or act(gate) * up of it, in parallel over column tiles."""
    cover, panels = quantize_rows(X, m, groups, tile.rows, tile.tail_rows)
    packed, blocks = weight.packed, tile.blocks
    with I.parallel(-(-packed.blocks // (blocks if gate is None else 2 * blocks))) as t:
        words = I.alloc_buffer((tile.depth // 4, blocks, 16), "uint32")
        scales = I.alloc_buffer((tile.depth // groups.size, blocks, 16), "float32")
        columns = _Gemm(weight, tile, cover, panels, Unpacked(words, scales, groups.size))
        if gate is None:
            columns.multiply(t * blocks, Y, t * blocks)
        else:
            # What this thread needs of both halves stays in its L2.
            halves = I.alloc_buffer((2 * m, 16 * blocks), "float32")
            with I.serial(2) as half:
                columns.multiply(half * (packed.blocks // 2) + t * blocks, halves, 0, half * m)
            with I.serial(m) as row, I.serial(I.min(blocks, gate.width // 16 - t * blocks)) as b:
                y = (Y, row, (t * blocks + b) * 16)
                gate_row(gate, (halves, row, b * 16), (halves, m + row, b * 16), y, 16)
