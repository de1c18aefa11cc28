"""GEMM with packed weights on matrix units, whose operands come through shared memory ahead of their use.

The products are those of `mma.py`. A workgroup has 64 rows of x, and each of its four subgroups a block of the weight,
or one with its gate. A stage is 32 columns of both. Copies of the next stages run while one is multiplied,
and need no registers (PTX ISA, cp.async; NVIDIA's CUTLASS, "Efficient GEMM in CUDA": software pipelining). Codes are as
packed in shared memory as in the weight.

Tried on an H200 with the shapes of Llama 3 8B, 512 rows: 128 rows and eight subgroups take 1.1 to 1.3 times as long,
two blocks for a subgroup 1.1 to 1.2 times.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr, put
from tir_schedules.gpu import device_calls
from tir_schedules.gpu.kernel import barrier, ceildiv, keep, launch, local, pin, shared
from tir_schedules.gpu.matmul.half_words import WORDS, has_codes, numbers
from tir_schedules.gpu.matmul.mma import LANE_SUMS, MMA_ROWS, STEPS, SUBGROUP_LANES, Outputs, add_products, put_values
from tir_schedules.gpu.matmul.output import Output
from tir_schedules.gpu.matmul.packed import BLOCK_ROWS, Packed
from tir_schedules.gpu.matmul.packed_loads import GROUP_LANES, LANE_ROWS, Weights, neighbours

_COLUMNS = STEPS * GROUP_LANES  # of x and the weight, in a stage
_X_WORDS = _COLUMNS // 2  # of a row of x in a stage
_PIECE = 4  # words that an invocation copies at once
_SUBGROUPS = 4  # of a workgroup, with the same rows of x
_TILES = 4  # of 16 rows of x
_ROWS = _TILES * MMA_ROWS
_THREADS = _SUBGROUPS * SUBGROUP_LANES
_X_STAGE = _ROWS * _X_WORDS
_MAX_STAGES = 4
_SHARED_BYTES = 49152  # that a workgroup has without being asked for more


@dataclass(frozen=True)
class _Shape(Outputs):
    """What a stage holds of a weight."""

    @property
    def lines(self) -> int:
        """Of 32 words of a block, in a stage: those of its codes."""
        w = self.weight
        if w.kept is not None:
            return w.bits
        return STEPS * (GROUP_LANES // w.run if w.bits else WORDS)

    @property
    def scale_lines(self) -> int:
        return 1 if has_codes(self.weight) else 0

    @property
    def stages(self) -> int:
        """As many as shared memory holds."""
        return min(
            _MAX_STAGES, _SHARED_BYTES // (4 * (_X_STAGE + self.words(self.lines) + self.words(self.scale_lines)))
        )

    def words(self, lines: int) -> int:
        """Of a stage, with so many lines of each block."""
        return _SUBGROUPS * self.blocks * lines * BLOCK_ROWS

    def block(self, by: Expr, subgroup: Expr, i: Expr) -> Expr:
        """The i-th block of the weight of a subgroup; the last one in place of those that there are not."""
        return I.min(by * _SUBGROUPS + subgroup, self.outputs - 1) + i * self.outputs


def fits(weight: Packed) -> bool:
    """Whether stages of a weight's columns are whole."""
    return weight.k % _COLUMNS == 0 and (weight.pairs or weight.kept is not None)


def gemm(weight: Packed, arrays: tuple[Buffer, ...], flat: Buffer, output: Output, m: Expr) -> None:
    """y = x w^T; if `output` has an activation, that of one half of the columns times the other half."""
    shape = _Shape(weight, output.activation is not None)
    with launch(_THREADS, ceildiv(m, _ROWS), ceildiv(shape.outputs, _SUBGROUPS)) as (bx, by, tx):
        I.evaluate(device_calls.require_size(SUBGROUP_LANES))
        I.evaluate(device_calls.resident(256 if shape.gated else 512))
        words = I.decl_buffer((m * (weight.k // 2),), "uint32", data=flat.data)
        last = keep(I.cast(m, "int32") - 1)
        stages = _Stages.of(shape, arrays, words, keep(bx * _ROWS), last, by, tx)
        count = weight.k // _COLUMNS
        for i in range(shape.stages - 1):
            if i < count:
                stages.copy(i, i)
            device_calls.copies_commit()
        work = _Work.of(stages)
        with I.serial(0, count) as chunk:
            device_calls.copies_wait(shape.stages - 2)
            barrier()
            ahead = keep(chunk + (shape.stages - 1))
            with I.If(ahead < count), I.Then():
                stages.copy(keep(ahead % shape.stages), ahead)
            device_calls.copies_commit()
            work.multiply(keep(chunk % shape.stages), chunk)
        work.store(output, last)


@dataclass(frozen=True)
class _Stages:
    """Shared memory for stages of x, of codes and of scales, and what is copied there."""

    shape: _Shape
    arrays: tuple[Buffer, ...]
    words: Buffer
    first: Expr
    last: Expr
    by: Expr
    tx: Expr
    xs: Buffer
    codes: Buffer
    scales: Buffer

    @staticmethod
    def of(
        shape: _Shape, arrays: tuple[Buffer, ...], words: Buffer, first: Expr, last: Expr, by: Expr, tx: Expr
    ) -> _Stages:
        sizes = (_X_STAGE, shape.words(shape.lines), max(1, shape.words(shape.scale_lines)))
        return _Stages(
            shape, arrays, words, first, last, by, tx, *(shared(shape.stages * size, "uint32") for size in sizes)
        )

    def copy(self, stage: Expr, chunk: Expr) -> None:
        """Begin to copy a chunk of columns."""
        shape = self.shape
        for piece in self._pieces(_X_STAGE):
            row = keep(I.min(self.first + piece // (_X_WORDS // _PIECE), self.last))
            column = chunk * _X_WORDS + piece % (_X_WORDS // _PIECE) * _PIECE
            at = stage * _X_STAGE + piece * _PIECE
            device_calls.copy_async(self.xs, at, self.words, row * (shape.weight.k // 2) + column)
        self._copy_lines(0, self.codes, stage, shape.lines, chunk * shape.lines)
        if shape.scale_lines:
            self._copy_lines(1, self.scales, stage, 1, chunk // 2)

    def _copy_lines(self, array: int, to: Buffer, stage: Expr, lines: int, first: Expr) -> None:
        """Lines of 32 words of all blocks of the workgroup, from line `first` of each block on."""
        shape = self.shape
        columns = shape.weight.sizes().of_array(array)
        size = max(1, shape.weight.experts) * shape.weight.blocks * columns * BLOCK_ROWS
        source = I.decl_buffer((size,), "uint32", data=self.arrays[array].data)
        own = lines * BLOCK_ROWS // _PIECE
        for piece in self._pieces(shape.words(lines)):
            number, word = keep(piece // own), piece % own * _PIECE
            block = shape.block(self.by, number // shape.blocks, number % shape.blocks)
            at = stage * shape.words(lines) + piece * _PIECE
            device_calls.copy_async(to, at, source, (block * columns + first) * BLOCK_ROWS + word)

    def _pieces(self, words: int) -> Iterator[Expr]:
        """The pieces that this invocation copies, of so many words."""
        pieces = words // _PIECE
        for begin in range(0, pieces, _THREADS):
            piece = keep(self.tx + begin)
            if begin + _THREADS <= pieces:
                yield piece
                continue
            with I.If(piece < pieces), I.Then():
                yield piece


@dataclass(frozen=True)
class _Staged(Weights):
    """A weight of which a stage has codes, and their scales: blocks are those of a subgroup, steps 0 to 3."""

    stages: _Stages = field(kw_only=True)
    first: Expr = field(kw_only=True)  # block of the stages

    def _vector(self, array: int, block: Expr, column: Expr) -> list[Expr]:
        if array and not self.stages.shape.scale_lines:
            return super()._vector(array, block, column)
        buffer, lines = (self.stages.scales, 1) if array else (self.stages.codes, self.stages.shape.lines)
        line = (self.first + block) * lines + column
        return neighbours(buffer, line * BLOCK_ROWS + self.lane * LANE_ROWS, LANE_ROWS)


@dataclass(frozen=True)
class _Work:
    """A subgroup's products: `sums` [tile, block, product, 4]."""

    stages: _Stages
    subgroup: Expr
    g: Expr
    t: Expr
    sums: Buffer

    @staticmethod
    def of(stages: _Stages) -> _Work:
        lane = keep(device_calls.lane())
        count = _TILES * stages.shape.blocks * LANE_ROWS * LANE_SUMS
        sums = local(count)
        for i in range(count):
            put(sums, i, 0.0)
        return _Work(stages, keep(device_calls.subgroup_id()), keep(lane // STEPS), keep(lane % STEPS), sums)

    def multiply(self, stage: Expr, chunk: Expr) -> None:
        """Add the products of a stage, which has a chunk of columns."""
        shape = self.stages.shape
        first = keep((stage * _SUBGROUPS + self.subgroup) * shape.blocks)
        weights = _Staged(shape.weight, self.stages.arrays, self.g, stages=self.stages, first=first)
        right = [self._numbers(weights, i, chunk) for i in range(shape.blocks)]
        for tile in range(_TILES):
            rows = []
            for part in range(2):
                at = stage * _X_STAGE + self._row(tile, part) * _X_WORDS + self.t * WORDS
                rows.append(neighbours(self.stages.xs, at, WORDS))
            for i, products in enumerate(right):
                add_products(self.sums, self._at(tile, i), rows, products)

    def _numbers(self, weights: _Staged, i: int, chunk: Expr) -> list[list[Expr]]:
        """The lane's part of a block: eight columns of four rows."""
        w = weights.weight
        if w.kept is not None:
            stored = weights.joined(weights.kept_step(i, 0, self.t), self.t)
            block = self.stages.shape.block(self.stages.by, self.subgroup, i)
            return numbers(weights, stored, weights.kept_scales(block, chunk, self.t))
        scales = []
        if has_codes(w):
            twice = keep(I.cast(chunk % 2, "uint32") * I.uint32(0x2222) + I.uint32(0x1010))
            scales = [pin(device_calls.permute_bytes(word, word, twice)) for word in weights.scale_words(i, 0)]
        return numbers(weights, weights.step(i, self.t), scales)

    def _row(self, tile: int, part: int) -> Expr:
        return tile * MMA_ROWS + part * (MMA_ROWS // 2) + self.g

    def _at(self, tile: int, block: int) -> int:
        return (tile * self.stages.shape.blocks + block) * LANE_ROWS * LANE_SUMS

    def store(self, output: Output, last: Expr) -> None:
        """Store what rows and columns there are."""
        shape = self.stages.shape
        block = keep(self.stages.by * _SUBGROUPS + self.subgroup)
        for tile in range(_TILES):
            for part in range(2):
                row = keep(self.stages.first + self._row(tile, part))
                exists = row <= last
                if shape.outputs % _SUBGROUPS:
                    exists = I.And(exists, block < shape.outputs)
                with I.If(exists), I.Then():
                    put_values(output, row, block, self.t, [self._values(tile, b, part) for b in range(shape.blocks)])

    def _values(self, tile: int, block: int, part: int) -> list[Expr]:
        """Eight neighbours of a row of y."""
        at = self._at(tile, block) + 2 * part
        return [self.sums[at + j * LANE_SUMS + i] for i in range(2) for j in range(LANE_ROWS)]
