"""Few rows of x by a packed weight on matrix units, which multiply eight rows as fast as one.

The weight is on the left of `mma.py`'s products, whose rows g and g + 8 are two of the lane's four rows, and x on the
right: column g is a row of x. So 16 rows of the weight meet 8 rows of x at once. Codes are multiplied without their
scales, which one multiply-add an output applies to the sum of a quantization group.

Subgroups of a workgroup share the columns. Each loads as much as its registers hold and then multiplies: by Little's
law an H200 needs 3.4 MB in flight (4.3 TB/s, if an answer takes 0.8 us), 26 KB for each of 132 multiprocessors. A
subgroup has 512 bytes of int4 weights for 32 columns, and 4.6 KB with their scales in eight such loads.

A row's sum has the same terms in the same order whatever the rows beside it: which subgroup has which columns depends
on the weight alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr, put
from tir_schedules.gpu import device_calls
from tir_schedules.gpu.kernel import barrier, ceildiv, keep, launch, local, pin, shared
from tir_schedules.gpu.matmul.half_words import WORDS, biased_codes, biases, has_codes, in_code_order, numbers
from tir_schedules.gpu.matmul.mma import LANE_SUMS, STEPS, SUBGROUP_LANES, Outputs
from tir_schedules.gpu.matmul.output import Output
from tir_schedules.gpu.matmul.packed import BLOCK_ROWS, Packed
from tir_schedules.gpu.matmul.packed_loads import GROUP_LANES, Weights, neighbours
from tir_schedules.op import Op
from tir_schedules.rule import Knobs

X_ROWS = 8  # rows of x in a product
_PRODUCTS = 2  # of 16 rows of the weight, in a block
_MAX_SUBGROUPS = 16
_MAX_TILES = 4
_RESIDENT = 512  # threads of a multiprocessor, with 128 registers each; half as many where a thread has many sums
_MANY_SUMS = 32
_OTHER_REGISTERS = 36  # of a thread: those that hold neither sums nor what was loaded
_MAX_LOADED = 84


@dataclass(frozen=True)
class _Shape(Outputs):
    """A workgroup has a block of the weight, its gate, and `tiles` of eight rows of x; `subgroups` share columns."""

    subgroups: int
    tiles: int = 1

    @property
    def rows(self) -> int:
        return self.tiles * X_ROWS

    @property
    def threads(self) -> int:
        return self.subgroups * SUBGROUP_LANES

    @property
    def sums(self) -> int:
        """Of a lane, for a tile of rows of x."""
        return self.blocks * _PRODUCTS * LANE_SUMS

    @property
    def chunks(self) -> int:
        """Of 32 columns."""
        return -(-self.weight.k // (STEPS * GROUP_LANES))

    @property
    def granule(self) -> int:
        """Chunks whose scales share a word: they go to one subgroup."""
        return max(1, Weights(self.weight, (), 0).steps // STEPS)

    @property
    def granules(self) -> int:
        return self.chunks // self.granule

    @property
    def resident(self) -> int:
        """Threads of a multiprocessor."""
        return max(self.threads, _RESIDENT if self.tiles * self.sums < _MANY_SUMS else _RESIDENT // 2)

    @property
    def batch(self) -> int:
        """Granules that are loaded before they are multiplied."""
        if self.weight.kept is not None:
            return 1
        words = {0: WORDS, 4: 1, 8: 2}.get(self.weight.bits, WORDS)
        chunk = 4 * self.blocks * words + WORDS * self.tiles
        free = min(65536 // self.resident - self.tiles * self.sums - _OTHER_REGISTERS, _MAX_LOADED)
        return max(1, free // (self.granule * chunk + 4 * self.blocks))


def subgroups_of(weight: Packed, gated: bool, knobs: Knobs) -> int:
    """As many as keep the device busy, while each has four chunks of columns."""
    shape = _Shape(weight, gated, 1)
    most = min(_MAX_SUBGROUPS, int(knobs["gemv_invocations"]) // (shape.outputs * SUBGROUP_LANES), shape.chunks // 4)
    return 1 << max(0, most.bit_length() - 1)


def few(
    op: Op, weight: Packed, arrays: tuple[Buffer, ...], flat: Buffer, output: Output, m: Expr, knobs: Knobs
) -> None:
    """y = x w^T, gated if `output` has an activation, in the smallest tiles that have all rows, or the largest."""
    gated = output.activation is not None
    subgroups = subgroups_of(weight, gated, knobs)
    most = _MAX_TILES if op.facts.get("rows") == "few" else 1

    def of_tiles(tiles: int) -> None:
        shape = _Shape(weight, gated, subgroups, tiles)
        if tiles == most:
            _kernel(shape, arrays, flat, output, m)
            return
        with I.If(m <= shape.rows):
            with I.Then():
                _kernel(shape, arrays, flat, output, m)
            with I.Else():
                of_tiles(2 * tiles)

    of_tiles(1)


def _kernel(shape: _Shape, arrays: tuple[Buffer, ...], flat: Buffer, output: Output, m: Expr) -> None:
    with launch(shape.threads, ceildiv(m, shape.rows), shape.outputs) as (tile, block, tx):
        I.evaluate(device_calls.require_size(SUBGROUP_LANES))
        I.evaluate(device_calls.resident(shape.resident))
        lane = keep(device_calls.lane())
        g, t = keep(lane // STEPS), keep(lane % STEPS)
        subgroup = keep(device_calls.subgroup_id()) if shape.subgroups > 1 else 0
        last = keep(I.cast(m, "int32") - 1)
        words = I.decl_buffer(((last + 1) * (shape.weight.k // 2),), "uint32", data=flat.data)
        rows = [tile * shape.rows + i * X_ROWS for i in range(shape.tiles)]
        lines = [pin(I.min(row + g, last) * (shape.weight.k // GROUP_LANES)) * WORDS for row in rows]
        sums = local(shape.tiles * shape.sums)
        for i in range(shape.tiles * shape.sums):
            put(sums, i, 0.0)
        blocks = [block + i * shape.outputs for i in range(shape.blocks)]
        _Columns(shape, Weights(shape.weight, arrays, g), words, blocks, lines, t, sums).add_all(subgroup)

        def store(row: Expr, weight_row: Expr, totals: Sequence[Expr]) -> None:
            column = keep(block * BLOCK_ROWS + weight_row)
            exists = row <= last
            if output.width % BLOCK_ROWS:
                exists = I.And(exists, column < output.width)
            with I.If(exists), I.Then():
                value = totals[0] if output.activation is None else output.activation(totals[0]) * totals[1]
                put(output.flat, row * output.width + column, value)

        if shape.subgroups == 1:
            _store_own(shape, rows, lane, sums, store)
        else:
            _store_sums(shape, rows, lane, subgroup, tx, sums, store)


@dataclass(frozen=True)
class _Columns:
    """The columns of a subgroup: loads and products. `lines` are rows of x in `words`, one for each tile."""

    shape: _Shape
    weights: Weights
    words: Buffer
    blocks: Sequence[Expr]
    lines: Sequence[Expr]
    t: Expr
    sums: Buffer

    def add_all(self, subgroup: Expr) -> None:
        """Granules `subgroup`, `subgroup` + the number of subgroups, and so on, in batches."""
        shape = self.shape
        each, rest = divmod(shape.granules, shape.subgroups)
        batches, left = divmod(each, shape.batch)

        def granule(i: Expr) -> Expr:
            return keep(i * shape.subgroups + subgroup)

        with I.serial(0, batches) as batch:
            self._add([granule(batch * shape.batch + i) for i in range(shape.batch)])
        if left:
            self._add([granule(batches * shape.batch + i) for i in range(left)])
        if rest:
            with I.If(subgroup < rest), I.Then():
                self._add([granule(I.int32(each))])

    def _add(self, granules: Sequence[Expr]) -> None:
        """Load all, then multiply."""
        loads = [load for granule in granules for load in self._loads(granule)]
        for multiply in [load() for load in loads]:
            multiply()

    def _loads(self, granule: Expr) -> list[Callable[[], Callable[[], None]]]:
        """What loads each chunk of a granule, whose scales are loaded now, and returns what multiplies it."""
        shape, weights = self.shape, self.weights
        chunks = [keep(granule * shape.granule + i) for i in range(shape.granule)]
        if shape.weight.kept is not None:
            return [functools.partial(self._kept, chunk) for chunk in chunks]
        coded = has_codes(shape.weight)
        scales = [weights.scale_words(b, granule) if coded else weights.scales(b, granule) for b in self.blocks]

        def load(i: int) -> Callable[[], None]:
            step, inside = self._step(chunks[i])
            stored = [weights.step(b, step) for b in self.blocks]
            xs = self._xs(step, inside)
            if coded:
                of_rows = [[self._scale(word, granule, i) for word in words] for words in scales]
                return lambda: self._add_codes(stored, xs, of_rows)
            of_groups = [of_block[min(i, len(of_block) - 1)] for of_block in scales]
            return lambda: self._add_numbers(stored, xs, of_groups)

        return [functools.partial(load, i) for i in range(len(chunks))]

    def _step(self, chunk: Expr) -> tuple[Expr, Expr | None]:
        """The lane's step of a chunk, and whether it exists, if one may not; then it is the last."""
        steps = self.shape.weight.k // GROUP_LANES
        step = keep(chunk * STEPS + self.t)
        return (step, None) if steps % STEPS == 0 else (keep(I.min(step, steps - 1)), step < steps)

    def _xs(self, step: Expr, inside: Expr | None) -> list[list[Expr]]:
        """Eight columns of each tile's row of x, zeros where there are none."""
        rows = [neighbours(self.words, line + step * WORDS, WORDS) for line in self.lines]
        if inside is None:
            return rows
        return [[I.Select(inside, word, I.uint32(0)) for word in row] for row in rows]

    def _scale(self, word: Expr, granule: Expr, i: int) -> Callable[[], Expr]:
        """The scale of the granule's i-th chunk, float32, computed where it is needed."""
        halves = (device_calls.low_half, device_calls.high_half)
        if self.weights.scales_per_word == 2:
            return lambda: pin(halves[i](word))
        return lambda: pin(I.Select(granule % 2 == 0, halves[0](word), halves[1](word)))

    def _add_codes(self, stored: Sequence[Any], xs: Sequence[Any], scales: Sequence[Any]) -> None:
        """Sums += scale times the products of codes, which begin with those of the codes' biases."""
        weight, lefts = self.shape.weight, []
        for b, (of_block, of_rows) in enumerate(zip(stored, scales)):
            for j in range(_PRODUCTS):
                left = biased_codes(weight, [words[2 * j : 2 * j + 2] for words in of_block])
                lefts.append((b, j, left, [scale() for scale in of_rows[2 * j : 2 * j + 2]]))
        for i, x in enumerate(in_code_order(weight, words) for words in xs):
            start = self._bias_products(x)
            for b, j, left, factors in lefts:
                group = local(LANE_SUMS)
                device_calls.mma_from(group, 0, start, *_factors(left, x, 0))
                device_calls.mma(group, 0, *_factors(left, x, 2))
                for n in range(LANE_SUMS):
                    at = self._at(i, b, j) + n
                    put(self.sums, at, self.sums[at] + group[n] * factors[n // 2])

    def _bias_products(self, x: Sequence[Expr]) -> Buffer:
        products = local(LANE_SUMS)
        for n in range(LANE_SUMS):
            put(products, n, 0.0)
        _multiply(products, 0, [biases(self.shape.weight)] * 2, x)
        return products

    def _add_numbers(self, stored: Sequence[Any], xs: Sequence[Any], scales: Sequence[Any]) -> None:
        for b, (of_block, of_rows) in enumerate(zip(stored, scales)):
            self._add_words(b, numbers(self.weights, of_block, of_rows), xs)

    def _add_words(self, b: int, left: Sequence[Any], xs: Sequence[Any]) -> None:
        for i, x in enumerate(xs):
            for j in range(_PRODUCTS):
                _multiply(self.sums, self._at(i, b, j), left[2 * j : 2 * j + 2], x)

    def _kept(self, chunk: Expr) -> Callable[[], None]:
        """A chunk of a block format, which is a run of it."""
        w = self.weights
        stored = [w.kept_step(b, chunk, self.t) for b in self.blocks]
        xs = self._xs(keep(chunk * STEPS + self.t), None)

        def multiply() -> None:
            for b, (block, words) in enumerate(zip(self.blocks, stored)):
                scales = w.kept_scales(block, chunk, self.t)
                self._add_words(b, numbers(w, w.joined(words, self.t), scales), xs)

        return multiply

    def _at(self, tile: int, block: int, product: int) -> int:
        return tile * self.shape.sums + (block * _PRODUCTS + product) * LANE_SUMS


def _multiply(sums: Buffer, at: int, left: Sequence[Sequence[Expr]], x: Sequence[Expr]) -> None:
    """Add the product of 16 rows of the weight, of which `left` are the lane's two, by eight columns a lane of x."""
    for half in (0, 2):
        device_calls.mma(sums, at, *_factors(left, x, half))


def _factors(left: Sequence[Sequence[Expr]], x: Sequence[Expr], half: int) -> tuple[list[Expr], Sequence[Expr]]:
    """The words of both factors, of the words `half` and `half` + 1 of rows."""
    return [left[0][half], left[1][half], left[0][half + 1], left[1][half + 1]], x[half : half + 2]


def _place(lane: Expr, number: Expr) -> tuple[Expr, Expr]:
    """Row of x in its tile, and row of the weight in its block, of a lane's number of those of a block."""
    x_row = lane % STEPS * 2 + number % 2
    return x_row, lane // STEPS * 4 + number // LANE_SUMS * 2 + number % LANE_SUMS // 2


def _store_own(
    shape: _Shape, rows: Sequence[Expr], lane: Expr, sums: Buffer, store: Callable[[Expr, Expr, list[Expr]], None]
) -> None:
    for i, first in enumerate(rows):
        for number in range(_PRODUCTS * LANE_SUMS):
            x_row, weight_row = _place(lane, number)
            own = [sums[i * shape.sums + b * _PRODUCTS * LANE_SUMS + number] for b in range(shape.blocks)]
            store(keep(first + x_row), weight_row, own)


def _store_sums(
    shape: _Shape, rows: Sequence[Expr], lane: Expr, subgroup: Expr, tx: Expr, sums: Buffer,
    store: Callable[[Expr, Expr, list[Expr]], None],
) -> None:  # fmt: skip
    """Add the sums of all subgroups, in order; each invocation has some of them, one tile after another."""
    parts = shared(shape.subgroups * shape.sums * SUBGROUP_LANES)
    of_block = _PRODUCTS * LANE_SUMS
    for i, first in enumerate(rows):
        if i:
            barrier()
        for n in range(shape.sums):
            put(parts, (subgroup * shape.sums + n) * SUBGROUP_LANES + lane, sums[i * shape.sums + n])
        barrier()
        for begin in range(0, of_block * SUBGROUP_LANES, shape.threads):
            at = keep(tx + begin)
            number = keep(at // SUBGROUP_LANES)
            x_row, weight_row = _place(lane, number)
            with I.If(at < of_block * SUBGROUP_LANES), I.Then():
                totals = []
                for b in range(shape.blocks):
                    total = local(1)
                    put(total, 0, 0.0)
                    for part in range(shape.subgroups):
                        index = (part * shape.sums + b * of_block + number) * SUBGROUP_LANES + lane
                        put(total, 0, total[0] + parts[index])
                    totals.append(total[0])
                store(keep(first + x_row), keep(weight_row), totals)
