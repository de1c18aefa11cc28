"""GEMM without matrix units: each lane has a tile of rows of x by columns of y."""

from __future__ import annotations

from dataclasses import dataclass

from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr, f32, put
from tir_schedules.gpu.kernel import ceildiv, keep, launch, local
from tir_schedules.gpu.matmul.packed import BLOCK_ROWS, Packed, Rows, sum_in_order
from tir_schedules.rule import Knobs


@dataclass(frozen=True)
class GemmShape:
    """The tile of an invocation: `rows` of x, and `columns` of y, 32 apart."""

    rows: int
    columns: int


def gemm_blocks_knob(n: int, k: int, knobs: Knobs) -> str:
    """The name of the knob for the columns of a tile of a weight [n, k]."""
    return "gemm_small_blocks" if n * k <= int(knobs.get("gemm_small", 0)) else "gemm_blocks"


def gemm_shape(weight: Packed, knobs: Knobs) -> GemmShape:
    """Tiles of equal width; `gemm_small_blocks` wide for weights of at most `gemm_small` numbers."""
    blocks = int(knobs[gemm_blocks_knob(weight.n, weight.k, knobs)])
    tiles = -(-weight.blocks // blocks)
    return GemmShape(int(knobs["gemm_rows"]), -(-weight.blocks // tiles))


def gemm(rows: Rows, m: Expr, x: Buffer, y: Buffer, shape: GemmShape) -> None:
    """y = x w^T, in tiles.

    A word is dequantized once for all rows, and an element of x is loaded once for all columns. All invocations of a
    workgroup read the same elements of x, from caches and uniform loads. There is no shared memory, because software
    adapters run invocations as coroutines if there are barriers. Words are unrolled for them too: they load one number
    in about 100 instructions, and store every variable under a mask at each iteration of a loop.
    """
    w, sizes, tile_rows, tile_columns = rows.weight, rows.sizes, shape.rows, shape.columns
    with launch(BLOCK_ROWS, ceildiv(sizes.blocks, tile_columns), ceildiv(m, tile_rows)) as (bx, by, lane):
        sums, row_starts = local(tile_rows * tile_columns), local(tile_rows, "int32")
        last = keep(m - 1)
        # Where each row begins, in memory: TVM expands a binding wherever it is used.
        flat = I.decl_buffer((m * sizes.k,), str(x.dtype), data=x.data)
        for i in range(tile_rows):
            put(row_starts, i, I.min(by * tile_rows + i, last) * sizes.k)
        blocks = [bx * tile_columns + j for j in range(tile_columns)]
        if w.blocks % tile_columns:
            blocks = [keep(I.min(block, sizes.blocks - 1)) for block in blocks]
        for i in range(tile_rows * tile_columns):
            put(sums, i, 0.0)

        def tile(word: Expr, count: int) -> None:
            """Add the products of the first `count` elements of a word."""
            values = [rows.values(block, lane, word, count) for block in blocks]
            for i in range(tile_rows):
                xs = [keep(f32(flat[row_starts[i] + word * w.run + e])) for e in range(count)]
                for j in range(tile_columns):
                    # This order of operands keeps sums in registers with a simple register allocator.
                    put(
                        sums,
                        i * tile_columns + j,
                        sum_in_order([sums[i * tile_columns + j], *(v * a for v, a in zip(values[j], xs))]),
                    )

        with I.serial(0, sizes.k // w.run) as word:
            tile(word, w.run)
        if w.k % w.run:
            tile(sizes.k // w.run, w.k % w.run)
        with I.serial(0, tile_rows) as i, I.If(by * tile_rows + i <= last), I.Then():
            for j in range(tile_columns):
                column = (bx * tile_columns + j) * BLOCK_ROWS + lane
                if w.n % (BLOCK_ROWS * tile_columns) == 0:
                    put(y, (by * tile_rows + i, column), sums[i * tile_columns + j])
                    continue
                with I.If(column < sizes.n), I.Then():
                    put(y, (by * tile_rows + i, column), sums[i * tile_columns + j])
