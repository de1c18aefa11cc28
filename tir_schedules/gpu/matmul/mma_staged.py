"""GEMM with packed weights on matrix units, whose operands come through shared memory ahead of their use.

The products are those of `mma.py`. A workgroup has `tall` times 64 rows of x by four subgroups' blocks of the weight;
subgroups beside each other share rows of x, those below each other blocks of the weight. A stage is 32 columns of both.
Copies of the next stages are under way while one is multiplied, and need no registers (PTX ISA, cp.async; NVIDIA's
CUTLASS, "Efficient GEMM in CUDA": software pipelining). Codes are as packed in shared memory as in the weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr, put
from tir_schedules.gpu import device_calls
from tir_schedules.gpu.kernel import barrier, ceildiv, keep, launch, local, pin, shared
from tir_schedules.gpu.matmul.half_words import WORDS, has_codes, numbers
from tir_schedules.gpu.matmul.mma import LANE_SUMS, MMA_ROWS, STEPS, SUBGROUP_LANES, add_products, put_values
from tir_schedules.gpu.matmul.output import Output
from tir_schedules.gpu.matmul.packed import BLOCK_ROWS, Packed
from tir_schedules.gpu.matmul.packed_loads import GROUP_LANES, LANE_ROWS, Weights, neighbours
from tir_schedules.rule import Knobs

_COLUMNS = STEPS * GROUP_LANES  # of x and the weight, in a stage
_X_WORDS = _COLUMNS // 2  # of a row of x in a stage
_PIECE = 4  # words that an invocation copies at once
_BESIDE = 4  # subgroups with the same rows of x
_TILES = 4  # of 16 rows of x, of a subgroup
_MAX_STAGES = 4
_SHARED_BYTES = 49152


@dataclass(frozen=True)
class _Shape:
    """`tall` subgroups below each other; each has `wide` blocks of the weight, and their gates if `gated`."""

    weight: Packed
    tall: int
    gated: bool
    wide: int

    @property
    def blocks(self) -> int:
        """Of the weight, of a subgroup."""
        return 2 if self.gated else self.wide

    @property
    def outputs(self) -> int:
        """Blocks of columns of y."""
        return self.weight.blocks // 2 if self.gated else self.weight.blocks

    @property
    def groups(self) -> int:
        """Workgroups that share rows of x."""
        return -(-self.outputs // (_BESIDE * self.wide))

    @property
    def rows(self) -> int:
        return self.tall * _TILES * MMA_ROWS

    @property
    def threads(self) -> int:
        return self.tall * _BESIDE * SUBGROUP_LANES

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
        return min(_MAX_STAGES, _SHARED_BYTES // (4 * (self.x_words + self.code_words + self.scale_words)))

    @property
    def x_words(self) -> int:
        """Of a stage in shared memory."""
        return self.rows * _X_WORDS

    @property
    def code_words(self) -> int:
        return _BESIDE * self.blocks * self.lines * BLOCK_ROWS

    @property
    def scale_words(self) -> int:
        return _BESIDE * self.blocks * self.scale_lines * BLOCK_ROWS


def fits(weight: Packed) -> bool:
    """Whether stages of a weight's columns are whole."""
    return weight.k % _COLUMNS == 0 and (weight.pairs or weight.kept is not None)


def gemm(weight: Packed, arrays: tuple[Buffer, ...], flat: Buffer, output: Output, m: Expr, knobs: Knobs) -> None:
    """y = x w^T; if `output` has an activation, that of one half of the columns times the other half."""
    gated = output.activation is not None
    shape = _Shape(weight, int(knobs["mma_tall"]), gated, 1 if gated else int(knobs["mma_wide"]))
    with launch(shape.threads, ceildiv(m, shape.rows), shape.groups) as (bx, by, tx):
        I.evaluate(device_calls.require_size(SUBGROUP_LANES))
        I.evaluate(device_calls.resident(512 if shape.blocks == 1 else 256))
        words = I.decl_buffer((m * (weight.k // 2),), "uint32", data=flat.data)
        last = keep(I.cast(m, "int32") - 1)
        stages = _Stages.of(shape, arrays, words, keep(bx * shape.rows), last, by, tx)
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


def _block(shape: _Shape, by: Expr, beside: Expr, i: Expr) -> Expr:
    """The i-th block of the weight of a subgroup; the last one in place of those that there are not."""
    if shape.gated:
        return I.min(by * _BESIDE + beside, shape.outputs - 1) + i * shape.outputs
    return I.min((by * _BESIDE + beside) * shape.wide + i, shape.outputs - 1)


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
        sizes = (shape.x_words, shape.code_words, max(1, shape.scale_words))
        return _Stages(
            shape, arrays, words, first, last, by, tx, *(shared(shape.stages * size, "uint32") for size in sizes)
        )

    def copy(self, stage: Expr, chunk: Expr) -> None:
        """Begin to copy a chunk of columns."""
        shape = self.shape
        for piece in self._pieces(shape.x_words):
            row = keep(I.min(self.first + piece // (_X_WORDS // _PIECE), self.last))
            column = chunk * _X_WORDS + piece % (_X_WORDS // _PIECE) * _PIECE
            at = stage * shape.x_words + piece * _PIECE
            device_calls.copy_async(self.xs, at, self.words, row * (shape.weight.k // 2) + column)
        self._copy_lines(0, self.codes, stage * shape.code_words, shape.lines, chunk * shape.lines)
        if shape.scale_lines:
            self._copy_lines(1, self.scales, stage * shape.scale_words, 1, chunk // 2)

    def _copy_lines(self, array: int, to: Buffer, begin: Expr, lines: int, first: Expr) -> None:
        """Lines of 32 words of all blocks of the workgroup, from line `first` of each block on."""
        shape = self.shape
        columns = shape.weight.sizes().of_array(array)
        size = max(1, shape.weight.experts) * shape.weight.blocks * columns * BLOCK_ROWS
        source = I.decl_buffer((size,), "uint32", data=self.arrays[array].data)
        own = lines * BLOCK_ROWS // _PIECE
        for piece in self._pieces(_BESIDE * shape.blocks * lines * BLOCK_ROWS):
            number, word = keep(piece // own), piece % own * _PIECE
            block = _block(shape, self.by, number // shape.blocks, number % shape.blocks)
            device_calls.copy_async(to, begin + piece * _PIECE, source, (block * columns + first) * BLOCK_ROWS + word)

    def _pieces(self, words: int) -> Iterator[Expr]:
        """The pieces that this invocation copies, of so many words."""
        pieces, threads = words // _PIECE, self.shape.threads
        for begin in range(0, pieces, threads):
            piece = keep(self.tx + begin)
            if begin + threads <= pieces:
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
    below: Expr
    beside: Expr
    g: Expr
    t: Expr
    sums: Buffer

    @staticmethod
    def of(stages: _Stages) -> _Work:
        lane, subgroup = keep(device_calls.lane()), keep(device_calls.subgroup_id())
        count = _TILES * stages.shape.blocks * LANE_ROWS * LANE_SUMS
        sums = local(count)
        for i in range(count):
            put(sums, i, 0.0)
        below, beside = keep(subgroup // _BESIDE), keep(subgroup % _BESIDE)
        return _Work(stages, below, beside, keep(lane // STEPS), keep(lane % STEPS), sums)

    def multiply(self, stage: Expr, chunk: Expr) -> None:
        """Add the products of a stage, which has a chunk of columns."""
        shape = self.stages.shape
        first = keep((stage * _BESIDE + self.beside) * shape.blocks)
        weights = _Staged(shape.weight, self.stages.arrays, self.g, stages=self.stages, first=first)
        right = [self._numbers(weights, i, chunk) for i in range(shape.blocks)]
        for tile in range(_TILES):
            rows = []
            for part in range(2):
                row = (self.below * _TILES + tile) * MMA_ROWS + part * (MMA_ROWS // 2) + self.g
                at = stage * shape.x_words + row * _X_WORDS + self.t * WORDS
                rows.append(neighbours(self.stages.xs, at, WORDS))
            for i, products in enumerate(right):
                add_products(self.sums, self._at(tile, i), rows, products)

    def _numbers(self, weights: _Staged, i: int, chunk: Expr) -> list[list[Expr]]:
        """The lane's part of a block: eight columns of four rows."""
        w = weights.weight
        if w.kept is not None:
            stored = weights.joined(weights.kept_step(i, 0, self.t), self.t)
            block = _block(self.stages.shape, self.stages.by, self.beside, i)
            return numbers(weights, stored, weights.kept_scales(block, chunk, self.t))
        scales = []
        if has_codes(w):
            twice = keep(I.cast(chunk % 2, "uint32") * I.uint32(0x2222) + I.uint32(0x1010))
            scales = [pin(device_calls.permute_bytes(word, word, twice)) for word in weights.scale_words(i, 0)]
        return numbers(weights, weights.step(i, self.t), scales)

    def _at(self, tile: int, block: int) -> int:
        return (tile * self.stages.shape.blocks + block) * LANE_ROWS * LANE_SUMS

    def store(self, output: Output, last: Expr) -> None:
        """Store what rows and columns there are."""
        shape = self.stages.shape
        number = keep(self.stages.by * _BESIDE + self.beside)
        for tile in range(_TILES):
            for part in range(2):
                place = (self.below * _TILES + tile) * MMA_ROWS + part * (MMA_ROWS // 2) + self.g
                row = keep(self.stages.first + place)
                for i in range(shape.wide):
                    block, exists = keep(number * shape.wide + i), row <= last
                    if shape.outputs % (_BESIDE * shape.wide):
                        exists = I.And(exists, block < shape.outputs)
                    values = [self._values(tile, i + b, part) for b in range(shape.blocks // shape.wide)]
                    with I.If(exists), I.Then():
                        put_values(output, row, block, self.t, values)

    def _values(self, tile: int, block: int, part: int) -> list[Expr]:
        """Eight neighbours of a row of y."""
        at = self._at(tile, block) + 2 * part
        return [self.sums[at + j * LANE_SUMS + i] for i in range(2) for j in range(LANE_ROWS)]
