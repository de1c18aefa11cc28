"""Prefill rows times a weight of fewer than 8 bits: codes become bytes in scratch once for all rows.

They stay what they are, and so do their scales: the arithmetic is that of decode rows. x has one scale for 32 numbers
of a row, fewer where a group of the weight has fewer.

With vectors of 16 lanes a register tile of 12 sums takes 96 instructions that multiply for 32 of K. Conversion to
float32, a product of scales and a multiplication with it are 36 more, of which 24 go to the units that multiply:
80 of 100 of their operations are dot products. With scales for 256, on which codes are rounded once more, 97 would be,
at twice the error.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr
from tir_schedules.cpu.gate import Gate, gate_row
from tir_schedules.cpu.int8_activations import Cover, Panels, quantize_rows
from tir_schedules.cpu.int8_dot import Dot, Weight
from tir_schedules.cpu.int8_unpacked import GROUP, Unpacked, alloc_unpacked, unpack, unpacked_groups
from tir_schedules.cpu.packed_weight import LANES, Packed
from tir_schedules.cpu.store import Output
from tir_schedules.cpu.vectors import Registers, prefetch, read, splat, value

# Of K that is unpacked at a time, unless a record says otherwise: 32 columns are 16 KiB and their scales 2, beside 3
# KiB of the rows that pass by.
DEPTH = 512


@dataclass(frozen=True)
class Int8Tile:
    """Register tile: `rows` of x (or `tail_rows` where that wastes less) by `blocks` of 16 columns.

    `depth` of K is unpacked at a time where there are many rows.
    """

    rows: int
    tail_rows: int
    blocks: int
    depth: int = DEPTH


def gemm_fits(w: Packed, dot: Dot) -> bool:
    """True for codes of fewer than 8 bits with more than one scale a row; not for AVX2, whose sums are in int16."""
    return w.bits < 8 and (w.blocked or w.groups > 1) and dot.kind != "avx2"


def gemm_tile(
    panels: Panels, panel: Expr, columns: Unpacked, first: Expr, count: Expr, out: Output, weight: Weight
) -> None:
    """Emit y (+)= a panel times `count` unpacked groups of K, `first` and those after it."""
    dot, lanes, per_block = weight.dot, weight.dot.lanes, LANES // weight.dot.lanes
    rows, vectors, words = out.rows, out.blocks * per_block, columns.size // 4
    total, acc = Registers(rows * vectors, lanes), Registers(rows * vectors, lanes, "int32")
    word, factor = Registers(vectors, lanes, "uint32"), Registers(2 * vectors, lanes)
    minima = weight.packed.minima
    out.restore(total, first > 0)
    with I.serial(count) as c:
        with I.unroll(rows) as r, I.unroll(vectors) as v:
            start = I.int32(0) if minima else panels.corrections[panel, first + c, r]
            acc[r * vectors + v] = splat(start, lanes)
        with I.unroll(words) as k:
            with I.unroll(vectors) as v:
                word[v] = read(columns.words, (c * words + k, v // per_block, v % per_block * lanes), lanes)
            with I.unroll(rows) as r, I.unroll(vectors) as v:
                bytes_ = I.reinterpret(f"int8x{4 * lanes}", word[v])
                x = panels.words[panel, (first + c) * words + k, r]
                acc[r * vectors + v] = dot(acc[r * vectors + v], bytes_, x, 4)
        with I.unroll(vectors) as v:
            for which in range(1 + minima):
                factor[v * 2 + which] = columns.factor(c, v // per_block, v % per_block * lanes, lanes, which)
        with I.unroll(rows) as r, I.unroll(vectors) as v:
            i, x_scale = r * vectors + v, splat(panels.scales[panel, first + c, r], lanes)
            sums = I.cast(acc[i], f"float32x{lanes}")
            if minima:
                x_sum = I.cast(panels.corrections[panel, first + c, r], "float32")
                sums = sums * factor[v * 2] + factor[v * 2 + 1] * splat(x_sum, lanes)
                total[i] = total[i] + sums * x_scale
            elif weight.packed.blocked:
                total[i] = total[i] + sums * factor[v * 2] * x_scale
            else:
                total[i] = total[i] + sums * (x_scale * factor[v * 2])
    out.store(total)


@dataclass(frozen=True)
class _Next:
    """Where codes and scales come from after those that are unpacked: `depth` of K further in the same `blocks`, or
    the first of the blocks after them.
    """

    weight: Weight
    block: Expr
    first: Expr

    @classmethod
    def after(cls, weight: Weight, block: Expr, first: Expr, depth: int, blocks: int) -> _Next:
        """What comes after `depth` of K from `first` on of `blocks` blocks."""
        more = value(first + depth < weight.packed.k)
        return cls(weight, value(I.Select(more, block, block + blocks)), value(I.Select(more, first + depth, 0)))

    def ask_group(self, b: Expr, k: Expr) -> None:
        """Emit prefetches of the group at `k` of block b, and of its scales."""
        bits, run = self.weight.packed.bits, (self.first + k) // GROUP
        with I.unroll(bits) as i:
            prefetch(self.weight.words, (self.block + b, run * bits + i, 0))
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
        tile, cover, packed, parts = self.tile, self.cover, self.weight.packed, GROUP // self.columns.size
        runs, depth = -(-packed.k // GROUP), tile.depth // GROUP
        with I.serial(-(-runs // depth)) as d:
            first, count = d * depth, I.min(depth, runs - d * depth)
            coming = _Next.after(self.weight, first_block, first * GROUP, tile.depth, tile.blocks)
            with I.serial(count) as slot, I.serial(tile.blocks) as b:
                coming.ask_group(b, slot * GROUP)
                stored = I.min(first_block + b, packed.blocks - 1)
                unpack(self.weight, stored, first + slot, self.columns, slot, b)
            for panel, row, rows in cover.tiles():
                out = Output(y, first_row + row, first_row + cover.m, block, rows, tile.blocks)
                gemm_tile(self.panels, panel, self.columns, first * parts, count * parts, out, self.weight)


def gemm(X: Buffer, weight: Weight, Y: Buffer, m: Expr, tile: Int8Tile, gate: Gate | None) -> None:
    """Emit y = x W^T, or act(gate) * up of it, in parallel over column tiles."""
    cover, panels = quantize_rows(X, m, unpacked_groups(weight), tile.rows, tile.tail_rows)
    packed, blocks = weight.packed, tile.blocks
    with I.parallel(-(-packed.blocks // (blocks if gate is None else 2 * blocks))) as t:
        columns = _Gemm(weight, tile, cover, panels, alloc_unpacked(weight, tile.depth, blocks))
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
