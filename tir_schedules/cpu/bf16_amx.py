"""Prefill rows times a packed weight with Intel's tile registers (AMX): 32 rows by 32 columns of y at a time.

x and the weights become bfloat16, each number off by at most 1/256: less than int8 with a scale for 32 loses,
and outliers cost their neighbors nothing. A tile of float32 sums runs over `DEPTH` of K, so that nothing has to be
scaled on the way, as sums of bytes with a scale for 32 of K would be: half tiles, whose sums go through memory after
every 16 cycles, reach a quarter of the peak of bytes at best, and bfloat16 has half of it.

Four products of 16 cycles take 32 of K, beside them four loads of tiles of 8 cycles each. Between two depths sums are
loaded and stored: 96 cycles in 2,048. Weights become bfloat16 once for all rows: about 11 instructions for two columns
of 16, a sixth of the time with 512 rows. By these throughputs of Sapphire Rapids 80 % of the peak of bfloat16 are
possible. An estimate; measured speeds are in docs/status.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr, put
from tir_schedules.cpu import amx
from tir_schedules.cpu.amx import ROWS
from tir_schedules.cpu.block_weight import Blocks
from tir_schedules.cpu.int8_dot import Dot, Weight
from tir_schedules.cpu.packed_weight import LANES, Packed, Quantized
from tir_schedules.cpu.vectors import read, splat, store, value

STEP = 32  # of K in a tile
# Of K between two visits of sums: 64 columns are 128 KiB of bfloat16 in L2, 32 rows of x 64 KiB.
DEPTH = 1024
CHUNK = 256  # of K that is in float32 at a time
BLOCKS = 4  # of 16 columns in a task: each tile of x is loaded from far away once for two products of tiles
SUMS, FIRST, SECOND = 0, 4, 6  # tiles: 2 x 2 sums, two of x, two of w


def amx_fits(w: Packed, dot: Dot) -> bool:
    """True where the CPU has tiles, but for rows of one group that do not end with a step."""
    return dot.kind == "amx_int8" and (w.blocked or w.group_size % STEP == 0)


def _rounded(x: Expr, lanes: int) -> Expr:
    """Bits uint32[lanes] of float32 numbers, whose upper halves are the nearest bfloat16; NaN stays NaN."""
    bits = value(I.reinterpret(f"uint32x{lanes}", x))
    odd = I.bitwise_and(I.shift_right(bits, splat(I.uint32(16), lanes)), splat(I.uint32(1), lanes))
    nearest = bits + (splat(I.uint32(0x7FFF), lanes) + odd)
    return I.Select(x == x, nearest, splat(I.uint32(0x7FC00000), lanes))


def pair_of(even: Expr, odd: Expr, lanes: int) -> Expr:
    """uint32[lanes] of the bfloat16 numbers of two vectors, those of `even` in the lower halves."""
    low = I.shift_right(_rounded(even, lanes), splat(I.uint32(16), lanes))
    return I.bitwise_or(low, I.bitwise_and(_rounded(odd, lanes), splat(I.uint32(0xFFFF0000), lanes)))


@dataclass(frozen=True)
class _Task:
    """All rows of x in bfloat16, and what a thread has for BLOCKS blocks of 16 columns from `block` on.

    rows uint32[panel, step, 16 * 16]: 16 rows of 16 pairs. columns uint32[DEPTH / 2, BLOCKS, 16]: pairs along K.
    sums f32[panel, 16, 16 * BLOCKS].
    """

    weight: Quantized | Blocks
    rows: Buffer
    panels: Expr
    block: Expr
    numbers: Buffer
    columns: Buffer
    sums: Buffer

    def prepare(self, d: Expr) -> None:
        """Emit the d-th DEPTH of K of the columns; past the end of K there may be anything but NaN."""
        blocks, chunks = self.weight.w.blocks, DEPTH // CHUNK
        left = -(-self.weight.w.k // CHUNK) - d * chunks
        with I.serial(BLOCKS) as b, I.serial(I.min(chunks, left)) as c:

            def keep(k: Expr, values: Expr) -> None:
                store(self.numbers, (k, 0), values, LANES)

            self.weight.columns(I.min(self.block + b, blocks - 1), d * chunks + c, CHUNK, keep)
            with I.serial(CHUNK // 2) as pair:
                even, odd = (read(self.numbers, (pair * 2 + i, 0), LANES) for i in range(2))
                store(self.columns, (c * (CHUNK // 2) + pair, b, 0), pair_of(even, odd, LANES), LANES)

    def multiply(self, panel: Expr, height: int, d: Expr, steps: Expr) -> None:
        """Emit sums of `height` panels (+)= their products with the d-th DEPTH of K, `steps` tiles."""
        with I.serial(BLOCKS // 2) as half:
            tiles = [(i, b, SUMS + 2 * i + b) for i in range(height) for b in range(2)]
            with I.If(d > 0):
                with I.Then():
                    for i, b, tile in tiles:
                        amx.load(tile, self._sum(panel + i, half * 2 + b), 4 * LANES * BLOCKS)
                with I.Else():
                    for _, _, tile in tiles:
                        amx.zero(tile)
            with I.serial(steps) as step:
                for b in range(2):
                    amx.load(SECOND + b, self.columns[step * ROWS, half * 2 + b, 0], 4 * LANES * BLOCKS)
                for i in range(height):
                    amx.load(FIRST + i, self.rows[panel + i, d * (DEPTH // STEP) + step, 0], 64)
                    for b in range(2):
                        amx.multiply("bf16", SUMS + 2 * i + b, FIRST + i, SECOND + b)
            for i, b, tile in tiles:
                amx.store(tile, self._sum(panel + i, half * 2 + b), 4 * LANES * BLOCKS)

    def _sum(self, panel: Expr, b: Expr) -> Expr:
        return self.sums[panel, 0, b * LANES]

    def store(self, Y: Buffer, m: Expr) -> None:
        """Emit Y[:, 16 * block :] = the sums, as far as there are columns."""
        n = int(Y.shape[1])
        with I.serial(m) as row, I.serial(BLOCKS) as b:
            block, at = self.block + b, (row // ROWS, row % ROWS, b * LANES)
            with I.If(block < n // LANES):
                with I.Then():
                    store(Y, (row, block * LANES), read(self.sums, at, LANES), LANES)
                with I.Else(), I.serial(0, LANES) as lane, I.If(block * LANES + lane < n), I.Then():
                    put(Y, (row, block * LANES + lane), self.sums[row // ROWS, row % ROWS, b * LANES + lane])


def _pairs_of_rows(X: Buffer, m: Expr, panels: Expr, steps: int) -> Buffer:
    """Rows of x as bfloat16 in tiles, zeros past the end of K; the last one fills the last panel."""
    k, rows = int(X.shape[1]), I.alloc_buffer((panels, steps, ROWS * LANES), "uint32")
    with I.parallel(panels * ROWS) as i, I.serial(steps) as step:
        row, pairs = I.min(i, m - 1), STEP // 2

        def put_pairs(first: Expr, lanes: int, even: Expr, odd: Expr, step: Expr = step, i: Expr = i) -> None:
            at = (i // ROWS, step, i % ROWS * pairs + first)
            store(rows, at, pair_of(even, odd, lanes), lanes)

        with I.If((step + 1) * STEP <= k):
            with I.Then():
                halves = [value(read(X, (row, step * STEP + j * 16), 16)) for j in range(2)]
                put_pairs(0, 16, *(tirx.Shuffle(halves, list(range(odd, STEP, 2))) for odd in range(2)))
            with I.Else(), I.serial(0, pairs) as pair:
                at = step * STEP + pair * 2
                even, odd = (I.if_then_else(at + j < k, X[row, I.min(at + j, k - 1)], I.float32(0)) for j in range(2))
                put_pairs(pair, 1, even, odd)
    return rows


def amx_gemm(X: Buffer, weight: Weight, Y: Buffer, m: Expr) -> None:
    """Emit y = x W^T: per 64 columns and DEPTH of K, bfloat16 numbers once, then all rows."""
    w, stored = weight.packed, (weight.words, weight.scales, weight.subs)
    steps, panels = -(-w.k // STEP), I.bind((m + ROWS - 1) // ROWS)
    rows = _pairs_of_rows(X, m, panels, steps)
    with I.parallel(-(-w.blocks // BLOCKS)) as t:
        numbers = I.alloc_buffer((CHUNK, LANES), "float32")
        columns = I.alloc_buffer((DEPTH // 2, BLOCKS, LANES), "uint32")
        sums = I.alloc_buffer((panels, ROWS, LANES * BLOCKS), "float32")
        matrix = Blocks(w, *stored) if w.blocked else Quantized(w, *stored[:2])
        task = _Task(matrix, rows, panels, t * BLOCKS, numbers, columns, sums)
        amx.configure([(ROWS, 64)] * 8)
        with I.serial(-(-steps // (DEPTH // STEP))) as d:
            here = I.min(DEPTH // STEP, steps - d * (DEPTH // STEP))
            task.prepare(d)
            with I.serial(panels // 2) as p:
                task.multiply(p * 2, 2, d, here)
            with I.serial(panels % 2) as p:
                task.multiply(panels - 1 - p, 1, d, here)
        task.store(Y, m)
        amx.release()
