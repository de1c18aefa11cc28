"""GEMM with packed weights on cooperative matrices, where only the device knows which lane holds which number.

A workgroup multiplies a tile of x by a tile of the weight, 32 columns (`_DEPTH`) in a step. Matrices are loaded from
memory only, so both tiles go through shared memory as float16: x as it is, the weight dequantized. There are two
buffers: while the subgroups multiply one, their lanes load the words of the next and store them in the other, with one
barrier a step. `matrix_buffers` = 1 takes half the memory and a second barrier.

Rows in shared memory are 80 bytes apart, 16 more than they need. So matrices are loaded at multiples of 16 bytes
(Vulkan, VUID-RuntimeSpirv-OpCooperativeMatrixLoadKHR-08986), and 8 neighbouring rows begin in different banks of the 32
banks of 4 bytes. Sums leave through the same memory, one row of matrices at a time, because a lane cannot know which of
them it holds. Vulkan's cooperative matrices work this way, and Metal's SIMD-group matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr, put
from tir_schedules.gpu import device_calls
from tir_schedules.gpu.device_calls import LEFT, RIGHT, SUM, Matrix
from tir_schedules.gpu.kernel import barrier, ceildiv, keep, launch, pin, shared
from tir_schedules.gpu.matmul.packed import BLOCK_ROWS, Packed
from tir_schedules.gpu.matmul.packed_loads import GROUP_LANES, LANE_ROWS, Weights, neighbours
from tir_schedules.rule import Knobs

_DEPTH = 32  # columns of x and weight in a step
_LOAD_WORDS = 4  # 16 bytes
_PAD = 4  # words
_STRIDE = _DEPTH // 2 + _PAD  # words from one row to the next in shared memory
Store = Callable[[Expr, Expr, list[Expr], Expr], None]


@dataclass(frozen=True)
class Shape:
    """A workgroup's tile of `row_matrices` x `column_matrices` products for each subgroup.

    A product is `rows` x `columns`, of `depth` terms. An invocation dequantizes four rows of the weight in eight
    columns, so the tile has as many columns of y as invocations.
    """

    size: int  # lanes of a subgroup
    rows: int
    columns: int
    depth: int
    subgroups: int
    row_matrices: int
    column_matrices: int
    buffers: int = 2  # in shared memory

    @property
    def threads(self) -> int:
        return self.size * self.subgroups

    @property
    def across(self) -> int:
        """Subgroups with the same rows of x."""
        return self.threads // (self.column_matrices * self.columns)

    @property
    def down(self) -> int:
        """Subgroups with the same rows of the weight."""
        return self.subgroups // self.across

    @property
    def tile_rows(self) -> int:
        """Rows of x."""
        return self.down * self.row_matrices * self.rows

    @property
    def tile_columns(self) -> int:
        """Rows of the weight, including those of gates."""
        return self.threads

    @property
    def sums_stride(self) -> int:
        """Words from one row of sums to the next in shared memory."""
        return self.tile_columns + _PAD

    @property
    def words(self) -> int:
        """Words of shared memory."""
        return max(
            self.buffers * (self.tile_rows + self.tile_columns) * _STRIDE, self.down * self.rows * self.sums_stride
        )

    def problem(self, gated: bool) -> str:
        """Why there is no such tile, or ""."""
        if self.threads % (2 * BLOCK_ROWS if gated else BLOCK_ROWS):
            return f"{self.threads} invocations, no multiple of a block of the weight"
        if (
            _DEPTH % self.depth
            or self.threads % (self.column_matrices * self.columns)
            or self.subgroups % max(1, self.across)
        ):
            return "subgroups that do not fill a tile"
        return "" if self.tile_rows * _LOAD_WORDS % self.threads == 0 else "rows of x that do not fill the invocations"


def shape_of(knobs: Knobs) -> Shape | None:
    """The tile that knobs say, or None for a target without cooperative matrices."""
    if not int(knobs.get("matrix_rows", 0)):
        return None
    names = ("rows", "columns", "depth", "subgroups", "tall", "wide", "buffers")
    facts = {"matrix_buffers": 2, **knobs}
    return Shape(int(facts["subgroup"]), *(int(facts[f"matrix_{name}"]) for name in names))


def fits(weight: Packed, dtype: str, knobs: Knobs, gated: bool) -> bool:
    """Whether the target multiplies float16 on cooperative matrices, and steps of 32 columns divide this weight."""
    shape = shape_of(knobs)
    whole = weight.k % _DEPTH == 0 and (not weight.bits or weight.kept is not None or weight.group % _DEPTH == 0)
    return shape is not None and dtype == "float16" and whole and not shape.problem(gated)


@dataclass(frozen=True)
class _Step:
    """What an invocation has loaded of 32 columns: words of x and of the weight, scales of its rows.

    `part` is which eight columns it has of the weight.
    """

    x: list[list[Expr]]
    stored: list[list[Expr]]
    scales: Sequence[Any]
    part: Expr


@dataclass(frozen=True)
class _Tile:
    """A workgroup's work on its tile.

    `words` is shared memory, `block` the invocation's block of the weight, `row0` the tile's first row of x, `last` the
    last row of x; `down` and `across` are the subgroup's position in the tile.
    """

    shape: Shape
    weights: Weights
    x: Buffer  # two numbers in a word
    words: Buffer
    block: Expr
    tx: Expr
    row0: Expr
    last: Expr
    down: Expr
    across: Expr

    @cached_property
    def sums(self) -> list[Matrix]:
        s = self.shape
        return [Matrix(i, SUM, s.rows, s.columns) for i in range(s.row_matrices * s.column_matrices)]

    @cached_property
    def left_matrices(self) -> list[Matrix]:
        s, first = self.shape, len(self.sums)
        return [Matrix(first + i, LEFT, s.rows, s.depth) for i in range(s.row_matrices)]

    @cached_property
    def right_matrices(self) -> list[Matrix]:
        s, first = self.shape, len(self.sums) + len(self.left_matrices)
        return [Matrix(first + i, RIGHT, s.depth, s.columns) for i in range(s.column_matrices)]

    def fetch(self, step: Expr) -> _Step:
        """Load the words of a step; nothing waits for them yet."""
        w, half = self.weights.weight, self.weights.weight.k // 2
        x = []
        for i in range(self.shape.tile_rows * _LOAD_WORDS // self.shape.threads):
            at = self.tx + i * self.shape.threads
            row = I.min(self.row0 + at // _LOAD_WORDS, self.last)  # rows beyond the last are never stored
            x.append(
                neighbours(self.x, row * half + step * (_DEPTH // 2) + at % _LOAD_WORDS * _LOAD_WORDS, _LOAD_WORDS)
            )
        part = self.tx // GROUP_LANES % (_DEPTH // GROUP_LANES)
        if w.kept is not None:  # a step is a run
            scales = self.weights.kept_scales(self.block, step, keep(part))
            return _Step(x, self.weights.kept_step(self.block, step, keep(part)), scales, keep(part))
        stored = self.weights.step(self.block, keep(step * (_DEPTH // GROUP_LANES) + part))
        return _Step(x, stored, self._scales(step * _DEPTH // w.group if w.bits else step), part)

    def _scales(self, group: Expr) -> list[Expr]:
        """Scales of a quantization group, one for each of the four rows."""
        w = self.weights.weight
        if not w.bits:
            return []
        groups_per_unit = self.weights.steps * GROUP_LANES // w.group
        scales = self.weights.scales(self.block, group // groups_per_unit)
        return scales[0] if groups_per_unit == 1 else [pin(I.Select(group % 2 == 0, a, b)) for a, b in zip(*scales)]

    def store_step(self, fetched: _Step, buffer: Expr) -> None:
        """Store a step as float16 in one of the buffers."""
        s = self.shape
        for i, words in enumerate(fetched.x):
            at = self.tx + i * s.threads
            first = keep(self._left(buffer) + at // _LOAD_WORDS * _STRIDE + at % _LOAD_WORDS * _LOAD_WORDS)
            for j, word in enumerate(words):
                put(self.words, first + j, word)
        stored = self.weights.joined(fetched.stored, fetched.part)
        columns = [self.weights.column(stored, j, fetched.scales) for j in range(GROUP_LANES)]
        slot, part, lane = self.tx // _DEPTH, self.tx // GROUP_LANES % (_DEPTH // GROUP_LANES), self.tx % GROUP_LANES
        first = keep(self._right(buffer) + (slot * BLOCK_ROWS + lane * LANE_ROWS) * _STRIDE + part * (GROUP_LANES // 2))
        for row in range(LANE_ROWS):
            for j in range(GROUP_LANES // 2):
                pair = device_calls.half_pair(columns[2 * j][row], columns[2 * j + 1][row])
                put(self.words, first + row * _STRIDE + j, pair)

    def _left(self, buffer: Expr) -> Expr:
        return buffer * (self.shape.tile_rows * _STRIDE)

    def _right(self, buffer: Expr) -> Expr:
        return self.shape.buffers * self.shape.tile_rows * _STRIDE + buffer * (self.shape.tile_columns * _STRIDE)

    def multiply(self, buffer: Expr) -> None:
        """Add the products of the step in `buffer`."""
        s = self.shape
        left = keep(self._left(buffer) + self.down * (s.row_matrices * s.rows * _STRIDE))
        right = keep(self._right(buffer) + self.across * (s.column_matrices * s.columns * _STRIDE))
        for k in range(0, _DEPTH // 2, s.depth // 2):
            for i, matrix in enumerate(self.left_matrices):
                at = left + (i * s.rows * _STRIDE + k)
                device_calls.matrix_load(matrix, self.words, at, _STRIDE, by_columns=False)
            for j, matrix in enumerate(self.right_matrices):
                at = right + (j * s.columns * _STRIDE + k)
                device_calls.matrix_load(matrix, self.words, at, _STRIDE, by_columns=True)
            for n, total in enumerate(self.sums):
                device_calls.matrix_multiply(
                    total, self.left_matrices[n // s.column_matrices], self.right_matrices[n % s.column_matrices]
                )

    def store_sums(self, strip: int) -> None:
        """Store the sums of one row of matrices of every subgroup, [down, rows, tile_columns]."""
        s = self.shape
        first = keep(self.down * (s.rows * s.sums_stride) + self.across * (s.column_matrices * s.columns))
        for j in range(s.column_matrices):
            total = self.sums[strip * s.column_matrices + j]
            device_calls.matrix_store(total, self.words, first + j * s.columns, s.sums_stride)


def gemm(
    weight: Packed, arrays: tuple[Buffer, ...], flat: Buffer, store: Store, m: Expr, knobs: Knobs, gated: bool
) -> None:
    """y = x w^T through `store(row, block, values, lane)`: four columns of a block, then those of the gates."""
    shape = shape_of(knobs)
    assert shape is not None
    slots = shape.tile_columns // BLOCK_ROWS // (2 if gated else 1)
    outputs = weight.blocks // 2 if gated else weight.blocks
    with launch(shape.threads, ceildiv(m, shape.tile_rows), -(-outputs // slots)) as (bx, by, tx):
        I.evaluate(device_calls.require_size(shape.size))
        subgroup, slot = keep(device_calls.subgroup_id()), keep(tx // BLOCK_ROWS)
        block = keep(I.min(by * slots + slot % slots, outputs - 1) + slot // slots * outputs)
        words, last = shared(shape.words, "uint32"), keep(I.cast(m, "int32") - 1)
        x = I.decl_buffer((m * (weight.k // 2),), "uint32", data=flat.data)
        weights, place = (
            Weights(weight, arrays, keep(tx % GROUP_LANES)),
            (subgroup // shape.across, subgroup % shape.across),
        )
        tile = _Tile(shape, weights, x, words, block, tx, keep(bx * shape.tile_rows), last, *map(keep, place))
        for total in tile.sums:
            device_calls.matrix_clear(total)
        steps = weight.k // _DEPTH
        tile.store_step(tile.fetch(I.int32(0)), I.int32(0))
        with I.serial(0, steps) as step:
            barrier()
            fetched = tile.fetch(keep(I.min(step + 1, steps - 1)))
            tile.multiply(keep(step % shape.buffers))
            if shape.buffers == 1:
                barrier()
            tile.store_step(fetched, keep((step + 1) % shape.buffers))
        for strip in range(shape.row_matrices):
            barrier()
            tile.store_sums(strip)
            barrier()
            _finish(tile, strip, by * slots, slots, outputs, store)


def _finish(tile: _Tile, strip: int, first: Expr, slots: int, outputs: int, store: Store) -> None:
    """Store the sums that `store_sums` left in shared memory: four neighbours and those of their gates at a time."""
    s, count = tile.shape, tile.shape.down * tile.shape.rows * slots * GROUP_LANES
    with I.serial(0, ceildiv(count, s.threads)) as i:
        at = keep(i * s.threads + tile.tx)
        lane, slot, row = keep(at % GROUP_LANES), keep(at // GROUP_LANES % slots), keep(at // (GROUP_LANES * slots))
        to = keep(tile.row0 + row // s.rows * (s.row_matrices * s.rows) + strip * s.rows + row % s.rows)
        exists = I.And(to <= tile.last, first + slot < outputs)
        if count % s.threads:
            exists = I.And(exists, at < count)
        with I.If(exists), I.Then():
            halves = s.tile_columns // BLOCK_ROWS // slots
            begin = keep(row * s.sums_stride + slot * BLOCK_ROWS + lane * LANE_ROWS)
            places = [begin + half * slots * BLOCK_ROWS + c for half in range(halves) for c in range(LANE_ROWS)]
            values = [pin(I.reinterpret("float32", tile.words[place])) for place in places]
            store(to, keep(first + slot), values, lane)
