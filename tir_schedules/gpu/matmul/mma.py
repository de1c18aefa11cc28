"""GEMM with packed weights on matrix units: a subgroup of 32 lanes multiplies 16 x 16 by 16 x 8 numbers at once.

NVIDIA defines which number of a matrix a lane holds (PTX ISA, "Matrix Fragments for mma.m16n8k16"). With g = lane / 4
and t = lane % 4: of x the rows g and g + 8; of the weight the row g; of both the columns 2t, 2t + 1, 2t + 8, 2t + 9; of
the product the rows g and g + 8, and the columns 2t and 2t + 1.

The order of columns does not matter if x and the weight agree. A lane takes the eight columns 8t ... 8t + 7 of 32 for
two products, so it loads 16 bytes of a row of x. Rows of a block of the weight are interleaved over four products: row
4g + j is row g of product j. So a lane loads 16 bytes there too, and ends with eight neighbours of a row of y. Nothing
goes through shared memory: subgroups of a workgroup have the same rows of x and find them in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr, put
from tir_schedules.gpu import device_calls
from tir_schedules.gpu.kernel import ceildiv, keep, launch, local, pin
from tir_schedules.gpu.matmul.half_words import has_codes, numbers, scale_pairs
from tir_schedules.gpu.matmul.output import Output
from tir_schedules.gpu.matmul.packed import BLOCK_ROWS, Packed
from tir_schedules.gpu.matmul.packed_loads import GROUP_LANES, LANE_ROWS, Weights, neighbours, put_neighbours
from tir_schedules.gpu.matmul.planes import RUN_STEPS
from tir_schedules.rule import Knobs

SUBGROUP_LANES = 32
MMA_ROWS = 16  # rows of x in a product
STEPS = 4  # steps of eight columns in a chunk, one for each t
LANE_SUMS = 4  # numbers of a product in a lane


def fits(weight: Packed, dtype: str, knobs: Knobs) -> bool:
    """Whether the target multiplies float16 on matrix units, and they can read this weight."""
    readable = weight.group == STEPS * GROUP_LANES or not weight.bits or weight.kept is not None
    has_units = bool(int(knobs.get("mma", 0))) and int(knobs.get("subgroup", 0)) == SUBGROUP_LANES
    return has_units and dtype == "float16" and readable


@dataclass(frozen=True)
class _Work:
    """A subgroup's `tiles` of 16 rows of x by `blocks` of the weight; `sums` [tile, block, product, 4].

    `line(tile, part)` is the row of x that is row g + 8 part of a tile. `words` is x, two numbers in each.
    """

    weights: Weights
    words: Buffer
    blocks: Sequence[Expr]
    line: Callable[[int, int], Expr]
    tiles: int
    g: Expr
    t: Expr
    sums: Buffer

    def multiply(self, chunk: Expr, scales: Sequence[list[Expr]]) -> None:
        """Add the products of 32 columns; the last chunk of a row may have fewer."""
        w = self.weights.weight
        steps = w.k // GROUP_LANES
        step = keep(chunk * STEPS + self.t)
        inside = None if steps % STEPS == 0 else step < steps
        step = step if inside is None else keep(I.min(step, steps - 1))
        right = [self._right(block, step, scale) for block, scale in zip(self.blocks, scales)]
        for tile in range(self.tiles):
            rows = [self._left(self.line(tile, part), step, inside) for part in range(2)]
            for b, products in enumerate(right):
                add_products(self.sums, self._at(tile, b, 0), rows, products)

    def _at(self, tile: int, block: int, product: int) -> int:
        return ((tile * len(self.blocks) + block) * LANE_ROWS + product) * LANE_SUMS

    def _left(self, row: Expr, step: Expr, inside: Expr | None) -> list[Expr]:
        """Eight columns of a row of x, zeros where `inside` is false."""
        half = self.weights.weight.k // 2
        words = neighbours(self.words, row * half + step * STEPS, STEPS)
        return words if inside is None else [I.Select(inside, word, I.uint32(0)) for word in words]

    def _right(self, block: Expr, step: Expr, scales: Sequence[Any]) -> list[list[Expr]]:
        """Eight columns of the lane's four rows of the weight, two float16 in a word."""
        if self.weights.weight.kept is None:
            stored = self.weights.step(block, step)
        else:
            run, own = keep(step // RUN_STEPS), keep(step % RUN_STEPS)
            stored = self.weights.joined(self.weights.kept_step(block, run, own), own)
            scales = self.weights.kept_scales(block, run, own)
        return numbers(self.weights, stored, scales)

    def values(self, tile: int, part: int) -> list[list[Expr]]:
        """Eight neighbours of row g + 8 part of a tile, for each block."""
        return [
            [self.sums[self._at(tile, b, j) + 2 * part + i] for i in range(2) for j in range(LANE_ROWS)]
            for b in range(len(self.blocks))
        ]


@dataclass(frozen=True)
class Outputs:
    """A weight whose blocks are columns of y; if `gated`, its first half are the gates of its second half."""

    weight: Packed
    gated: bool

    @property
    def blocks(self) -> int:
        """Of the weight, for a block of columns of y."""
        return 2 if self.gated else 1

    @property
    def outputs(self) -> int:
        """Blocks of columns of y."""
        return self.weight.blocks // self.blocks


@dataclass(frozen=True)
class Shape(Outputs):
    """A workgroup has `tiles` of 16 rows of x; each subgroup has a block of the weight, and its gate if `gated`."""

    subgroups: int
    tiles: int

    @property
    def rows(self) -> int:
        return self.tiles * MMA_ROWS

    @property
    def threads(self) -> int:
        return SUBGROUP_LANES * self.subgroups

    @property
    def groups(self) -> int:
        """Workgroups that share rows of x."""
        return -(-self.outputs // self.subgroups)

    def multiply(
        self, arrays: tuple[Buffer, ...], words: Buffer, output: Output, by: Expr, rows: Rows, expert: Expr = 0
    ) -> None:
        """Store the products of workgroup `by` of those that share rows; `words` is x, two numbers in each."""
        w, outputs = self.weight, self.outputs
        lane = keep(device_calls.lane())
        g, t = keep(lane // STEPS), keep(lane % STEPS)
        block = keep(by * self.subgroups + device_calls.subgroup_id())
        own_block = block if outputs % self.subgroups == 0 else keep(I.min(block, outputs - 1))
        weights = Weights(w, arrays, g, expert)
        blocks = [own_block, own_block + outputs] if self.gated else [own_block]
        sums = local(self.tiles * len(blocks) * LANE_ROWS * LANE_SUMS)
        for i in range(self.tiles * len(blocks) * LANE_ROWS * LANE_SUMS):
            put(sums, i, 0.0)
        lines = rows.lines(self.tiles, g)
        work = _Work(weights, words, blocks, lambda tile, part: lines[tile][part], self.tiles, g, t, sums)
        parts = 1 if w.kept is not None else max(1, weights.steps // STEPS)
        chunks = -(-w.k // (STEPS * GROUP_LANES))
        with I.serial(0, chunks // parts) as unit:
            scales = [self._scales(weights, block, unit) for block in blocks]
            for part in range(parts):
                work.multiply(keep(unit * parts + part), [of[part] for of in scales])
        for tile in range(self.tiles):
            for part in range(2):
                row = keep(rows.first + (tile * MMA_ROWS + 8 * part) + g)
                exists = row <= rows.last
                with I.If(exists if outputs % self.subgroups == 0 else I.And(exists, block < outputs)), I.Then():
                    place = row if rows.order is None else rows.order[row]
                    put_values(output, place, own_block, t, work.values(tile, part))

    @staticmethod
    def _scales(weights: Weights, block: Expr, unit: Expr) -> list[Any]:
        if weights.weight.kept is not None:
            return [[]]
        return scale_pairs(weights, block, unit) if has_codes(weights.weight) else weights.scales(block, unit)


@dataclass(frozen=True)
class Rows:
    """Rows `first` ... `last` of x and y. With `order` row i is order[i] of y and order[i] / y_rows_per_x_row of x."""

    first: Expr
    last: Expr
    order: Buffer | None = None
    y_rows_per_x_row: int = 1

    def lines(self, tiles: int, g: Expr) -> list[list[Expr]]:
        """Rows g and g + 8 of each tile in x. Rows beyond the last read the last and are not stored."""
        places = [[tile * MMA_ROWS + part * 8 for part in range(2)] for tile in range(tiles)]
        rows = [[I.min(self.first + place + g, self.last) for place in pair] for pair in places]
        if self.order is None:
            return rows
        return [[pin(self.order[row] // self.y_rows_per_x_row) for row in pair] for pair in rows]


def gemm(weight: Packed, arrays: tuple[Buffer, ...], flat: Buffer, output: Output, m: Expr, knobs: Knobs) -> None:
    """y = x w^T; if `output` has an activation, that of one half of the columns times the other half."""
    gated = output.activation is not None
    tiles = int(knobs["mma_tiles"]) // (2 if gated else 1)
    shape = Shape(weight, gated, int(knobs["mma_subgroups"]), tiles)
    with launch(shape.threads, ceildiv(m, shape.rows), shape.groups) as (bx, by, _):
        I.evaluate(device_calls.require_size(SUBGROUP_LANES))
        words = I.decl_buffer((m * (weight.k // 2),), "uint32", data=flat.data)
        rows = Rows(keep(bx * shape.rows), keep(I.cast(m, "int32") - 1))
        shape.multiply(arrays, words, output, by, rows)


def add_products(sums: Buffer, at: int, rows: Sequence[list[Expr]], right: Sequence[list[Expr]]) -> None:
    """Add the products of 16 rows of x, of which `rows` are the lane's two, by the four rows of the weight in `right`.

    Rows have eight columns each, two in a word. The sums of each product are `LANE_SUMS` apart, from `at` on.
    """
    for j, words in enumerate(right):
        for half in range(2):
            left = [rows[i % 2][2 * half + i // 2] for i in range(4)]
            device_calls.mma(sums, at + j * LANE_SUMS, left, words[2 * half : 2 * half + 2])


def put_values(output: Output, row: Expr, block: Expr, t: Expr, values: list[list[Expr]]) -> None:
    results = values[0]
    if output.activation is not None:
        results = [output.activation(gate) * other for gate, other in zip(*values)]
    column = keep(block * BLOCK_ROWS + t * GROUP_LANES)
    if output.width % BLOCK_ROWS == 0:
        for i in (0, LANE_ROWS):
            put_neighbours(output.flat, row * output.width + column + i, results[i : i + LANE_ROWS])
        return
    for i, value in enumerate(results):
        with I.If(column + i < output.width), I.Then():
            put(output.flat, row * output.width + column + i, value)
