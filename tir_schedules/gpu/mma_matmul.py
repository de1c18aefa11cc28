"""GEMM with packed weights on matrix units: a subgroup of 32 lanes multiplies 16 x 16 by 16 x 8 numbers at once.

Which number of a matrix a lane has is NVIDIA's (PTX ISA, "Matrix Fragments for mma.m16n8k16"): with g = lane / 4 and
t = lane % 4, of x the rows g and g + 8, of the weight the row g, of both the columns 2t, 2t + 1, 2t + 8, 2t + 9; of the
product the rows g and g + 8, the columns 2t and 2t + 1. The order of columns of x and weight does not matter, if it is
the same for both: a lane takes eight neighbours, 8t ... 8t + 7 of 32, for two products, so that it loads 16 bytes of a
row of x. The rows of a block of the weight are dealt to four products, so that row 4g + j is row g of product j: a lane
loads 16 bytes there too, and has eight neighbours of a row of y at the end. Nothing goes through shared memory; the
subgroups of a workgroup have the same rows of x and find them in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm.script.ir_builder import tirx as I

from tir_schedules.gpu import device_calls
from tir_schedules.gpu.kernel import Buffer, Expr, ceildiv, keep, launch, local, pin, put
from tir_schedules.gpu.matmul import LANES, Packed
from tir_schedules.gpu.octets import OCTET, ROWS, Knobs, Weights, neighbours, put_neighbours

_SIZE = 32  # lanes that share a product
_QUAD = 4  # steps of eight columns, one for each t
TALL = 16  # rows of x of a product
_NUMBERS = 4  # of a product, in a lane


def fits(weight: Packed, dtype: str, knobs: Knobs) -> bool:
    """Whether the target multiplies float16 on matrix units, and they can read this weight."""
    rows = weight.group == _QUAD * OCTET or not weight.bits
    return bool(int(knobs.get("mma", 0))) and dtype == "float16" and int(knobs.get("subgroup", 0)) == _SIZE and rows


@dataclass(frozen=True)
class _Work:
    """`tiles` of 16 rows of x by `blocks` of the weight; `sums` [tile, block, product, 4].

    `line(tile, part)`: the row of x that is row g + 8 part of a tile.
    """

    weights: Weights
    words: Buffer  # x, two numbers in each
    blocks: Sequence[Expr]
    line: Callable[[int, int], Expr]
    tiles: int
    g: Expr
    t: Expr
    sums: Buffer

    def quad(self, quad: Expr, scales: Sequence[list[Expr]]) -> None:
        """Adds the products of 32 columns, of which there may be fewer at the end of a row."""
        w = self.weights.weight
        steps = w.k // OCTET
        step = keep(quad * _QUAD + self.t)
        inside = None if steps % _QUAD == 0 else step < steps
        step = step if inside is None else keep(I.min(step, steps - 1))
        right = [self._right(block, step, scale) for block, scale in zip(self.blocks, scales)]
        for tile in range(self.tiles):
            rows = [self._left(self.line(tile, part), step, inside) for part in range(2)]
            for b, products in enumerate(right):
                for j, words in enumerate(products):
                    at = self._at(tile, b, j)
                    for half in range(2):
                        left = [rows[i % 2][2 * half + i // 2] for i in range(4)]
                        device_calls.mma(self.sums, at, left, words[2 * half : 2 * half + 2])

    def _at(self, tile: int, block: int, product: int) -> int:
        return ((tile * len(self.blocks) + block) * ROWS + product) * _NUMBERS

    def _left(self, row: Expr, step: Expr, inside: Expr | None) -> list[Expr]:
        """Eight columns of a row of x; rows beyond the last are never stored."""
        half = self.weights.weight.k // 2
        found = neighbours(self.words, row * half + step * _QUAD, _QUAD)
        return found if inside is None else [I.Select(inside, word, I.uint32(0)) for word in found]

    def _right(self, block: Expr, step: Expr, scales: list[Expr]) -> list[list[Expr]]:
        """Eight columns of the lane's four rows, two float16 a word."""
        stored = self.weights.step(block, step)
        columns = [self.weights.column(stored, j, scales) for j in range(OCTET)]
        words = local(ROWS * _QUAD, "uint32")
        for row in range(ROWS):
            for i in range(_QUAD):
                pair = device_calls.half_pair(columns[2 * i][row], columns[2 * i + 1][row])
                put(words, row * _QUAD + i, pair)
        return [[words[row * _QUAD + i] for i in range(_QUAD)] for row in range(ROWS)]

    def values(self, tile: int, part: int) -> list[list[Expr]]:
        """Of each block eight neighbours of row g + 8 part of a tile."""
        return [
            [self.sums[self._at(tile, b, j) + 2 * part + i] for i in range(2) for j in range(ROWS)]
            for b in range(len(self.blocks))
        ]


@dataclass(frozen=True)
class Shape:
    """A workgroup has `tiles` of 16 rows of x; each of its `subgroups` a block of the weight, where `gated` two."""

    weight: Packed
    subgroups: int
    tiles: int
    gated: bool = False

    @property
    def rows(self) -> int:
        return self.tiles * TALL

    @property
    def threads(self) -> int:
        return _SIZE * self.subgroups

    @property
    def outputs(self) -> int:
        """Blocks of y."""
        return self.weight.blocks // 2 if self.gated else self.weight.blocks

    @property
    def groups(self) -> int:
        """Workgroups that share rows of x."""
        return -(-self.outputs // self.subgroups)

    def multiply(
        self, arrays: tuple[Buffer, ...], words: Buffer, output: Buffer, by: Expr, rows: Rows, expert: Expr = 0
    ) -> None:
        """The products of a workgroup, which is number `by` of those that share rows; `words`: x."""
        w, outputs = self.weight, self.outputs
        lane = keep(device_calls.lane())
        g, t = keep(lane // _QUAD), keep(lane % _QUAD)
        block = keep(by * self.subgroups + device_calls.subgroup_id())
        mine = block if outputs % self.subgroups == 0 else keep(I.min(block, outputs - 1))
        weights = Weights(w, arrays, g, expert)
        blocks = [mine, mine + outputs] if self.gated else [mine]
        sums = local(self.tiles * len(blocks) * ROWS * _NUMBERS)
        for i in range(self.tiles * len(blocks) * ROWS * _NUMBERS):
            put(sums, i, 0.0)
        lines = rows.lines(self.tiles, g)
        work = _Work(weights, words, blocks, lambda tile, part: lines[tile][part], self.tiles, g, t, sums)
        parts = max(1, weights.steps // _QUAD)
        quads = -(-w.k // (_QUAD * OCTET))
        with I.serial(0, quads // parts) as unit:
            scales = [weights.scales(one, unit) for one in blocks]
            for part in range(parts):
                work.quad(keep(unit * parts + part), [of[part] for of in scales])
        for tile in range(self.tiles):
            for part in range(2):
                row = keep(rows.first + (tile * TALL + 8 * part) + g)
                exists = row <= rows.last
                with I.If(exists if outputs % self.subgroups == 0 else I.And(exists, block < outputs)), I.Then():
                    _store(output, row if rows.order is None else rows.order[row], mine, t, work.values(tile, part))


@dataclass(frozen=True)
class Rows:
    """Rows `first` ... `last` of x and y; with `order` those that it names, in y, and `top` of them are one in x."""

    first: Expr
    last: Expr
    order: Buffer | None = None
    top: int = 1

    def lines(self, tiles: int, g: Expr) -> list[list[Expr]]:
        """Rows g and g + 8 of each tile in x; beyond the last it is the last, which is not stored."""
        places = [[tile * TALL + part * 8 for part in range(2)] for tile in range(tiles)]
        rows = [[I.min(self.first + place + g, self.last) for place in pair] for pair in places]
        if self.order is None:
            return rows
        return [[pin(self.order[row] // self.top) for row in pair] for pair in rows]


def gemm(weight: Packed, arrays: tuple[Buffer, ...], flat: Buffer, output: Buffer, m: Expr, knobs: Knobs) -> None:
    """y = x w^T, or `output`'s activation of one half of the columns times the other."""
    gated = output.activation is not None
    shape = Shape(weight, int(knobs["mma_subgroups"]), int(knobs["mma_tiles"]) // (2 if gated else 1), gated)
    with launch(shape.threads, ceildiv(m, shape.rows), shape.groups) as (bx, by, _):
        I.evaluate(device_calls.require_size(_SIZE))
        words = I.decl_buffer((m * (weight.k // 2),), "uint32", data=flat.data)
        rows = Rows(keep(bx * shape.rows), keep(I.cast(m, "int32") - 1))
        shape.multiply(arrays, words, output, by, rows)


def _store(output: Buffer, row: Expr, block: Expr, t: Expr, values: list[list[Expr]]) -> None:
    found = values[0]
    if output.activation is not None:
        found = [output.activation(gate) * other for gate, other in zip(*values)]
    column = keep(block * LANES + t * OCTET)
    if output.width % LANES == 0:
        for i in (0, ROWS):
            put_neighbours(output.flat, row * output.width + column + i, found[i : i + ROWS])
        return
    for i, value in enumerate(found):
        with I.If(column + i < output.width), I.Then():
            put(output.flat, row * output.width + column + i, value)
