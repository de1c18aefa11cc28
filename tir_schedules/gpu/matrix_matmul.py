"""GEMM with packed weights on cooperative matrices: which lane has which number of a product only the device knows.

A workgroup multiplies a tile of x by a tile of the weight, 32 columns (`_DEPTH`) at a step. Both go through shared
memory as float16, x as it is, the weight without its codes, since matrices are loaded from memory only. There are two
such tiles: while the subgroups multiply one, their lanes have the words of the next on the way, and store them in the
other; a step has one barrier. With `matrix_buffers` = 1 there is one tile: half the memory, and a barrier more. Rows in
shared memory are 80 bytes apart, 16 more than they have: matrices are loaded at multiples of 16 bytes (Vulkan,
VUID-RuntimeSpirv-OpCooperativeMatrixLoadKHR-08986), and 8 neighbouring rows begin in different banks of 4 bytes, of 32.
At the end sums go through the same memory, a matrix of each subgroup's rows at a time, because a lane has no way to
know which of them it has. Vulkan's cooperative matrices are so, and Metal's of SIMD groups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from tvm.script.ir_builder import tirx as I

from tir_schedules.gpu import device_calls
from tir_schedules.gpu.device_calls import LEFT, RIGHT, SUM, Matrix
from tir_schedules.gpu.kernel import Buffer, Expr, barrier, ceildiv, keep, launch, pin, put, shared
from tir_schedules.gpu.matmul import LANES, Packed
from tir_schedules.gpu.octets import OCTET, ROWS, Knobs, Weights, neighbours

_DEPTH = 32  # columns of x and weight in shared memory
_QUAD = 4  # words of 16 bytes
_PAD = 4
_STRIDE = _DEPTH // 2 + _PAD  # words of a row in shared memory
Store = Callable[[Expr, Expr, list[Expr], Expr], None]


@dataclass(frozen=True)
class Shape:
    """A workgroup's tile. A product is `rows` x `columns`, of `depth` terms; a subgroup has `tall` x `wide` of them.

    An invocation decodes four rows of the weight in eight columns, so that there are as many columns of y as
    invocations.
    """

    size: int  # lanes of a subgroup
    rows: int
    columns: int
    depth: int
    subgroups: int
    tall: int
    wide: int
    buffers: int = 2  # tiles in shared memory

    @property
    def threads(self) -> int:
        return self.size * self.subgroups

    @property
    def along(self) -> int:
        """Subgroups that share rows of x."""
        return self.threads // (self.wide * self.columns)

    @property
    def down(self) -> int:
        """Subgroups that share rows of the weight."""
        return self.subgroups // self.along

    @property
    def height(self) -> int:
        """Rows of x."""
        return self.down * self.tall * self.rows

    @property
    def width(self) -> int:
        """Rows of the weight, those of gates among them."""
        return self.threads

    @property
    def line(self) -> int:
        """Words of a row of sums in shared memory."""
        return self.width + _PAD

    @property
    def words(self) -> int:
        """Of shared memory."""
        return max(self.buffers * (self.height + self.width) * _STRIDE, self.down * self.rows * self.line)

    def problem(self, gated: bool) -> str:
        """"" or why there is no such tile."""
        if self.threads % (2 * LANES if gated else LANES):
            return f"{self.threads} invocations, no multiple of a block of the weight"
        if _DEPTH % self.depth or self.threads % (self.wide * self.columns) or self.subgroups % max(1, self.along):
            return "subgroups that do not fill a tile"
        return "" if self.height * _QUAD % self.threads == 0 else "rows of x that do not fill the invocations"


def shape_of(knobs: Knobs) -> Shape | None:
    """The tile of a target that multiplies matrices."""
    if not int(knobs.get("matrix_rows", 0)):
        return None
    product = (int(knobs[f"matrix_{key}"]) for key in ("rows", "columns", "depth", "subgroups", "tall", "wide"))
    return Shape(int(knobs["subgroup"]), *product, buffers=int(knobs.get("matrix_buffers", 2)))


def fits(weight: Packed, dtype: str, knobs: Knobs, gated: bool) -> bool:
    """Whether the target multiplies float16 on cooperative matrices, and steps of 32 columns fill this weight."""
    shape = shape_of(knobs)
    whole = weight.k % _DEPTH == 0 and (not weight.bits or weight.group % _DEPTH == 0)
    return shape is not None and dtype == "float16" and whole and not shape.problem(gated)


@dataclass(frozen=True)
class _Step:
    """What an invocation has on its way of 32 columns: words of x, of the weight, scales of its rows."""

    x: list[list[Expr]]
    stored: list[list[Expr]]
    scales: list[Expr]


@dataclass(frozen=True)
class _Tile:
    """`words`: shared memory. `block`: of the weight, the invocation's. `row0`, `last`: the first row of x here, the
    last that exists. `down`, `along`: where the subgroup is."""

    shape: Shape
    weights: Weights
    x: Buffer  # two numbers in a word
    words: Buffer
    block: Expr
    tx: Expr
    row0: Expr
    last: Expr
    down: Expr
    along: Expr

    # The matrices of a subgroup

    @cached_property
    def sums(self) -> list[Matrix]:
        s = self.shape
        return [Matrix(i, SUM, s.rows, s.columns) for i in range(s.tall * s.wide)]

    @cached_property
    def lefts(self) -> list[Matrix]:
        s, first = self.shape, len(self.sums)
        return [Matrix(first + i, LEFT, s.rows, s.depth) for i in range(s.tall)]

    @cached_property
    def rights(self) -> list[Matrix]:
        s, first = self.shape, len(self.sums) + len(self.lefts)
        return [Matrix(first + i, RIGHT, s.depth, s.columns) for i in range(s.wide)]

    # Steps

    def fetch(self, step: Expr) -> _Step:
        """Load what a step takes; nothing waits for it yet."""
        w, half = self.weights.weight, self.weights.weight.k // 2
        x = []
        for i in range(self.shape.height * _QUAD // self.shape.threads):
            at = self.tx + i * self.shape.threads
            row = I.min(self.row0 + at // _QUAD, self.last)  # rows beyond the last are never stored
            x.append(neighbours(self.x, row * half + step * (_DEPTH // 2) + at % _QUAD * _QUAD, _QUAD))
        part = self.tx // OCTET % (_DEPTH // OCTET)
        stored = self.weights.step(self.block, keep(step * (_DEPTH // OCTET) + part))
        return _Step(x, stored, self._scales(step * _DEPTH // w.group if w.bits else step))

    def _scales(self, group: Expr) -> list[Expr]:
        """Of a group of columns, each of the four rows."""
        w = self.weights.weight
        if not w.bits:
            return []
        halves = self.weights.steps * OCTET // w.group
        found = self.weights.scales(self.block, group // halves)
        return found[0] if halves == 1 else [pin(I.Select(group % 2 == 0, a, b)) for a, b in zip(*found)]

    def stash(self, fetched: _Step, buffer: Expr) -> None:
        """Store it as float16 in one of the tiles."""
        s = self.shape
        for i, words in enumerate(fetched.x):
            at = self.tx + i * s.threads
            first = keep(self._left(buffer) + at // _QUAD * _STRIDE + at % _QUAD * _QUAD)
            for j, word in enumerate(words):
                put(self.words, first + j, word)
        columns = [self.weights.column(fetched.stored, j, fetched.scales) for j in range(OCTET)]
        slot, part, lane = self.tx // _DEPTH, self.tx // OCTET % (_DEPTH // OCTET), self.tx % OCTET
        first = keep(self._right(buffer) + (slot * LANES + lane * ROWS) * _STRIDE + part * (OCTET // 2))
        for row in range(ROWS):
            for j in range(OCTET // 2):
                pair = device_calls.half_pair(columns[2 * j][row], columns[2 * j + 1][row])
                put(self.words, first + row * _STRIDE + j, pair)

    def _left(self, buffer: Expr) -> Expr:
        return buffer * (self.shape.height * _STRIDE)

    def _right(self, buffer: Expr) -> Expr:
        return self.shape.buffers * self.shape.height * _STRIDE + buffer * (self.shape.width * _STRIDE)

    def multiply(self, buffer: Expr) -> None:
        """Add the products of a step."""
        s = self.shape
        left = keep(self._left(buffer) + self.down * (s.tall * s.rows * _STRIDE))
        right = keep(self._right(buffer) + self.along * (s.wide * s.columns * _STRIDE))
        for k in range(0, _DEPTH // 2, s.depth // 2):
            for i, matrix in enumerate(self.lefts):
                at = left + (i * s.rows * _STRIDE + k)
                device_calls.matrix_load(matrix, self.words, at, _STRIDE, by_columns=False)
            for j, matrix in enumerate(self.rights):
                at = right + (j * s.columns * _STRIDE + k)
                device_calls.matrix_load(matrix, self.words, at, _STRIDE, by_columns=True)
            for n, total in enumerate(self.sums):
                device_calls.matrix_multiply(total, self.lefts[n // s.wide], self.rights[n % s.wide])

    def show(self, strip: int) -> None:
        """Store the sums of one matrix's rows of every subgroup, [down, rows, width]."""
        s = self.shape
        first = keep(self.down * (s.rows * s.line) + self.along * (s.wide * s.columns))
        for j in range(s.wide):
            total = self.sums[strip * s.wide + j]
            device_calls.matrix_store(total, self.words, first + j * s.columns, s.line)


def gemm(
    weight: Packed, arrays: tuple[Buffer, ...], flat: Buffer, store: Store, m: Expr, knobs: Knobs, gated: bool
) -> None:
    """`store(row, block, values, lane)` of y = x w^T: a lane's four columns of a block, and those of their gates."""
    shape = shape_of(knobs)
    assert shape is not None
    slots = shape.width // LANES // (2 if gated else 1)
    outputs = weight.blocks // 2 if gated else weight.blocks
    with launch(shape.threads, ceildiv(m, shape.height), -(-outputs // slots)) as (bx, by, tx):
        I.evaluate(device_calls.require_size(shape.size))
        subgroup, slot = keep(device_calls.subgroup_id()), keep(tx // LANES)
        block = keep(I.min(by * slots + slot % slots, outputs - 1) + slot // slots * outputs)
        words, last = shared(shape.words, "uint32"), keep(I.cast(m, "int32") - 1)
        x = I.decl_buffer((m * (weight.k // 2),), "uint32", data=flat.data)
        weights, place = Weights(weight, arrays, keep(tx % OCTET)), (subgroup // shape.along, subgroup % shape.along)
        tile = _Tile(shape, weights, x, words, block, tx, keep(bx * shape.height), last, *map(keep, place))
        for total in tile.sums:
            device_calls.matrix_clear(total)
        steps = weight.k // _DEPTH
        tile.stash(tile.fetch(I.int32(0)), I.int32(0))
        with I.serial(0, steps) as step:
            barrier()
            fetched = tile.fetch(keep(I.min(step + 1, steps - 1)))
            tile.multiply(keep(step % shape.buffers))
            if shape.buffers == 1:
                barrier()
            tile.stash(fetched, keep((step + 1) % shape.buffers))
        for strip in range(shape.tall):
            barrier()
            tile.show(strip)
            barrier()
            _finish(tile, strip, by * slots, slots, outputs, store)


def _finish(tile: _Tile, strip: int, first: Expr, slots: int, outputs: int, store: Store) -> None:
    """Hand out the sums that `show` stored, four neighbours and those of their gates to an invocation at a time."""
    s, count = tile.shape, tile.shape.down * tile.shape.rows * slots * OCTET
    with I.serial(0, ceildiv(count, s.threads)) as i:
        at = keep(i * s.threads + tile.tx)
        lane, slot, row = keep(at % OCTET), keep(at // OCTET % slots), keep(at // (OCTET * slots))
        to = keep(tile.row0 + row // s.rows * (s.tall * s.rows) + strip * s.rows + row % s.rows)
        exists = I.And(to <= tile.last, first + slot < outputs)
        if count % s.threads:
            exists = I.And(exists, at < count)
        with I.If(exists), I.Then():
            halves = s.width // LANES // slots
            begin = keep(row * s.line + slot * LANES + lane * ROWS)
            places = [begin + half * slots * LANES + c for half in range(halves) for c in range(ROWS)]
            values = [pin(I.reinterpret("float32", tile.words[place])) for place in places]
            store(to, keep(first + slot), values, lane)
