"""Packed weights and rows of x, as groups of 8 lanes of a subgroup load them.

A group is 8 neighbouring lanes; it reads a block of 32 rows of a weight. A lane has four rows, whose words are
adjacent (layout `rows32_pairs`): it loads 16 bytes at once, and the group loads a whole line of 128 bytes. Groups of a
subgroup take different columns or different blocks, so one schedule serves subgroups of 8, 16, 32 and 64 lanes. A step
is eight columns: each lane loads one column of x and gets the others by shuffles, or loads all of them; see `Xs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr, f32, put
from tir_schedules.gpu import device_calls
from tir_schedules.gpu.kernel import half_to_float, keep, local, pin
from tir_schedules.gpu.matmul.packed import BLOCK_ROWS, Packed, packed
from tir_schedules.gpu.matmul.planes import RUN, RUN_STEPS, STEP, Kept, Scale, byte_of, signed_byte_of
from tir_schedules.op import Op
from tir_schedules.rule import Declined

Held = dict[int, list[list[Expr]]]  # plane -> [word, lane's row]
GROUP_LANES = 8
LANE_ROWS = BLOCK_ROWS // GROUP_LANES  # rows of a block that a lane has


def neighbours(buffer: Buffer, index: Expr, count: int) -> list[Expr]:
    """buffer[index : index + count] by one load; the index is a multiple of `count`."""
    loaded = local(count, str(buffer.dtype))
    I.buffer_store(loaded, buffer[I.ramp(index, 1, count)], [I.ramp(0, 1, count)])
    return [loaded[i] for i in range(count)]


def put_neighbours(buffer: Buffer, index: Expr, values: Sequence[Expr]) -> None:
    """buffer[index : index + len(values)] = values by one store; the index is a multiple of their number."""
    count, dtype = len(values), str(buffer.dtype)
    vector = local(count, dtype)
    for i, value in enumerate(values):
        put(vector, i, value)
    I.buffer_store(buffer, vector[I.ramp(0, 1, count)], [I.ramp(index, 1, count)])


@dataclass(frozen=True)
class Lanes:
    """Position of an invocation: lane in its group of 8, group in its subgroup, subgroup in the workgroup."""

    lane: Expr
    group: Expr
    subgroup: Expr
    size: int

    def of_lane(self, value: Expr, lane: int) -> Expr:
        """`value` of another lane of this group."""
        index = I.int32(lane) if self.size == GROUP_LANES else self.group * GROUP_LANES + lane
        return device_calls.subgroup_shuffle(value, index)

    def sum_over_groups(self, sums: Buffer, count: int) -> None:
        """Each of `count` sums becomes the sum over the same lane of all groups."""
        step = GROUP_LANES
        while step < self.size:
            for i in range(count):
                put(sums, i, sums[i] + device_calls.subgroup_shuffle_xor(sums[i], I.int32(step)))
            step *= 2


def lanes_of(size: int) -> Lanes:
    """The position of the invocation. The kernel then requires full subgroups of `size` lanes."""
    I.evaluate(device_calls.require_size(size))
    lane = keep(device_calls.lane())
    return Lanes(keep(lane % GROUP_LANES), keep(lane // GROUP_LANES), keep(device_calls.subgroup_id()), size)


def packed_for_groups(op: Op) -> Packed | Declined:
    """The weight of a tagged operation, if groups of 8 lanes can read it."""
    weight = packed(op)
    if isinstance(weight, Declined):
        return weight
    columns = weight.group if weight.bits else GROUP_LANES
    if columns % GROUP_LANES or weight.k % columns or (weight.bits and GROUP_LANES % weight.run):
        return Declined(f"words of {weight.run} in {weight.k} columns")
    return weight


@dataclass(frozen=True)
class Weights:
    """The arrays of a weight (of one `expert`), loaded as vectors of a lane's four rows."""

    weight: Packed
    arrays: tuple[Buffer, ...]
    lane: Expr
    expert: Expr = 0

    @property
    def steps(self) -> int:
        """Steps in a unit: those that share a scale, or whose scales share a word; 1 for plain weights."""
        w = self.weight
        if not w.bits:
            return 1
        if w.kept is not None:
            return RUN_STEPS * (2 if w.k % (2 * RUN) == 0 else 1)
        return w.group // GROUP_LANES * self.scales_per_word

    @property
    def scales_per_word(self) -> int:
        return 2 if self.weight.pairs and self.weight.k // self.weight.group % 2 == 0 else 1

    @property
    def units(self) -> int:
        """Units of `steps` in a row of the weight."""
        return self.weight.k // GROUP_LANES // self.steps

    def kept_scales(self, block: Expr, run: Expr, step: Expr, stored: list[Scale] | None = None) -> list[Scale]:
        """Scales of the lane's rows for a step, the step-th of a run, of a weight in a block format.

        Codes are taken with 2**width added, see `column`: the minimum takes that and the zero point away. `stored`:
        `stored_scales` of the run, where it has one.
        """
        kept = self.weight.kept
        assert kept is not None
        columns = run * RUN + step // (kept.part // STEP) * kept.part
        scales = stored or self.stored_scales(block, columns)
        if kept.super_size:
            first = columns // kept.group * kept.each
            words = [self._vector(2, block, first + i)[0] for i in range(kept.each)]
            scales = [s.times([signed_byte_of(word, row) for word in words]) for row, s in enumerate(scales)]
        away, found = I.float32(-(1 << kept.width) - kept.zero), []
        for scale in scales:
            factor = pin(scale.factor)
            offset = factor * away if scale.minimum is None else scale.minimum + factor * away
            found.append(Scale(factor, pin(offset)))
        return found

    def stored_scales(self, block: Expr, column: Expr) -> list[Scale]:
        """Numbers of the array of scales for the lane's rows, and of that of zero points."""
        kept = self.weight.kept
        assert kept is not None
        span = column // kept.span
        if not kept.zeros:
            return self._stored_scales(kept, block, span)
        (word,) = self._vector(2, block, span)
        return [s.less(byte_of(word, row)).pinned() for row, s in enumerate(self._stored_scales(kept, block, span))]

    def _stored_scales(self, kept: Kept, block: Expr, span: Expr) -> list[Scale]:
        if kept.byte_scales:
            (word,) = self._vector(1, block, span)
            return [Scale(kept.stored_scale(pin(byte_of(word, row)))).pinned() for row in range(LANE_ROWS)]
        if kept.scale_format:
            numbers = [self._wide_scales(kept, block, span * kept.each + i) for i in range(kept.each)]
            return [Scale(*some).pinned() for some in zip(*numbers)]
        words = self._vector(1, block, span if kept.minima else span // 2)
        halves = [[I.bitwise_and(word, I.uint32(0xFFFF)), I.shift_right(word, I.uint32(16))] for word in words]
        if not kept.minima:
            halves = [[I.Select(span % 2 == 0, low, high)] for low, high in halves]
        return [Scale(*(kept.half_scale(pin(I.cast(half, "int32"))) for half in some)).pinned() for some in halves]

    def _wide_scales(self, kept: Kept, block: Expr, column: Expr) -> list[Expr]:
        """Scales or minima in float32 or bfloat16 for the lane's rows."""
        stored = self._vector(1, block, column)
        if kept.scale_format == "f32":
            return [kept.in_units(number) for number in stored]
        return [half for word in stored for half in kept.upper_halves(word)]

    def scales(self, block: Expr, unit: Expr) -> list[list[Expr]]:
        """Scales of a unit, [quantization group, lane's row]; none for a plain weight."""
        w = self.weight
        if not w.bits:
            return [[]]
        if not w.pairs:
            return [[pin(f32(value)) for value in self._vector(1, block, unit)]]
        pairs = [_floats(word) for word in self.scale_words(block, unit)]
        if self.scales_per_word == 2:
            return [[pin(pair[half]) for pair in pairs] for half in range(2)]
        return [[pin(I.Select(unit % 2 == 0, low, high)) for low, high in pairs]]

    def scale_words(self, block: Expr, unit: Expr) -> list[Expr]:
        """The words with the scales of a unit, two float16 in each, for the lane's rows."""
        return self._vector(1, block, unit if self.scales_per_word == 2 else unit // 2)

    def step(self, block: Expr, step: Expr) -> list[list[Expr]]:
        """The stored words of eight columns, [word, lane's row]."""
        count = _words_per_step(self.weight)
        return [self._vector(0, block, step * count + i) for i in range(count)]

    def held(self, block: Expr, run: Expr, plane: int, half: Expr = 0) -> Held:
        """The words of a run, or of its half, that several steps of a block format share."""
        kept = self.weight.kept
        assert kept is not None
        words = kept.words(half * 2).get(plane, [])
        return {plane: self._run_words(block, run, words)} if words else {}

    def kept_step(self, block: Expr, run: Expr, step: Expr, held: Held | None = None) -> list[list[Expr]]:
        """The stored words of a step of a run, [word, lane's row], in a block format; those of `held` are loaded."""
        kept, known = self.weight.kept, held or {}
        assert kept is not None
        planes = kept.words(step).items()
        return [word for p, words in planes for word in known.get(p) or self._run_words(block, run, words)]

    def _run_words(self, block: Expr, run: Expr, words: Sequence[Expr]) -> list[list[Expr]]:
        return [self._vector(0, block, run * self.weight.bits + word) for word in words]

    def joined(self, stored: list[list[Expr]], step: Expr) -> list[list[Expr]]:
        """The words of a step of a run as `column` reads them."""
        kept = self.weight.kept
        if kept is None:
            return stored
        rows = [kept.joined(words, step) for words in zip(*stored)]
        return [list(words) for words in zip(*rows)]

    def column(self, stored: list[list[Expr]], j: int, scales: Sequence[Any]) -> list[Expr]:
        """Column j of a step as float32, one number for each of the lane's rows.

        A code of b bits becomes the top of the mantissa of 2**b + code: two instructions. A conversion from integers
        runs at a quarter of the rate (NVIDIA) or needs a mask too.
        """
        w = self.weight
        if w.kept is not None:
            i, bit = w.kept.place(j)
            return [w.kept.number(word, bit) * s.factor + s.minimum for word, s in zip(stored[i], scales)]
        columns_per_word = GROUP_LANES // len(stored)
        vector, part = stored[j // columns_per_word], j % columns_per_word
        if not w.bits:
            return [_floats(word)[part] for word in vector] if w.pairs else [f32(x) for x in vector]
        mantissa_shift = 23 - w.bits
        shift = mantissa_shift - w.bits * part
        mask, exponent = I.uint32(((1 << w.bits) - 1) << mantissa_shift), I.uint32((127 + w.bits) << 23)
        values = []
        for word, scale in zip(vector, scales):
            shifted = I.shift_left(word, I.uint32(shift)) if shift >= 0 else I.shift_right(word, I.uint32(-shift))
            number = I.reinterpret("float32", I.bitwise_or(I.bitwise_and(shifted, mask), exponent))
            values.append((number - I.float32((1 << w.bits) + w.zero_point)) * scale)
        return values

    def _vector(self, array: int, block: Expr, column: Expr) -> list[Expr]:
        """A stored number for each of the lane's rows, or a word with a byte of each."""
        sizes, lanes = self.weight.sizes(), self.weight.lanes(array)
        columns, count = sizes.of_array(array), lanes // GROUP_LANES
        size = max(1, self.weight.experts) * sizes.blocks * columns * lanes
        flat = I.decl_buffer((size,), str(self.arrays[array].dtype), data=self.arrays[array].data)
        line = (self.expert * sizes.blocks + block) * columns + column
        at = line * lanes + self.lane * count
        return neighbours(flat, at, count) if count > 1 else [pin(flat[at])]


def _words_per_step(w: Packed) -> int:
    """Words of a row that hold a step."""
    if w.bits:
        return GROUP_LANES // w.run
    return GROUP_LANES // 2 if w.pairs else GROUP_LANES


def _floats(word: Expr) -> tuple[Expr, Expr]:
    """The two float16 of a uint32, as float32."""
    parts = I.bitwise_and(word, I.uint32(0xFFFF)), I.shift_right(word, I.uint32(16))
    low, high = (half_to_float(pin(I.cast(part, "int32")), signed=True) for part in parts)
    return low, high


@dataclass(frozen=True)
class Xs:
    """Rows of x that begin at `lines` of the buffer `flat`.

    `shuffled`: a lane loads one column of eight and gets the others by shuffles. Software adapters load one number at
    a time and shuffle in one instruction. GPUs load 16 bytes as fast as 4, once for a subgroup, and shuffle slowly.
    """

    flat: Buffer
    lines: Sequence[Expr]
    lanes: Lanes
    shuffled: bool

    def step(self, step: Expr) -> list[list[Expr]]:
        """Eight columns as this lane holds them, [row, 1 if shuffled else 8]."""
        if self.shuffled:
            return [[pin(f32(self.flat[line + step * GROUP_LANES + self.lanes.lane]))] for line in self.lines]
        return [
            [f32(x) for i in (0, 4) for x in neighbours(self.flat, line + step * GROUP_LANES + i, 4)]
            for line in self.lines
        ]

    def column(self, row: list[Expr], j: int) -> Expr:
        """Column j of a step in one row, float32."""
        return pin(self.lanes.of_lane(row[0], j)) if self.shuffled else row[j]
