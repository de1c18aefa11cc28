"""Packed weights and rows of x as octets of a subgroup read them.

An octet is eight neighbouring lanes of a subgroup. A block of 32 rows of a weight is one octet's: a lane has four rows,
whose words stand side by side (layout `rows32_pairs`), so that it loads 16 bytes at once and the octet a whole line of
128 bytes. The octets of a subgroup take different columns, or different blocks; so one schedule serves subgroups of
8, 16, 32 and 64 lanes. A step is eight columns: of x each lane loads one, and the others get it by a shuffle, or every
lane loads all of them, as `Xs` says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tvm.script.ir_builder import tirx as I

from tir_schedules.gpu import device_calls
from tir_schedules.gpu.kernel import (
    Argument,
    Buffer,
    Expr,
    Tensor,
    ceildiv,
    f32,
    half_to_float,
    keep,
    local,
    pin,
    put,
)
from tir_schedules.gpu.matmul import LANES, Packed, packed
from tir_schedules.op import Declined, Op

OCTET = 8
ROWS = LANES // OCTET  # of a lane
Knobs = Mapping[str, int | str]


def neighbours(buffer: Buffer, index: Expr, count: int) -> list[Expr]:
    """buffer[index], buffer[index + 1], ... by one load, where the index is a multiple of `count`."""
    found = local(count, str(buffer.dtype))
    I.buffer_store(found, buffer[I.ramp(index, 1, count)], [I.ramp(0, 1, count)])
    return [found[i] for i in range(count)]


def put_neighbours(buffer: Buffer, index: Expr, values: Sequence[Expr]) -> None:
    """buffer[index], buffer[index + 1], ... = values by one store, where the index is a multiple of their number."""
    count, dtype = len(values), str(buffer.dtype)
    kept = local(count, dtype)
    for i, value in enumerate(values):
        put(kept, i, value)
    I.buffer_store(buffer, kept[I.ramp(0, 1, count)], [I.ramp(index, 1, count)])


@dataclass(frozen=True)
class Lanes:
    """Where an invocation is: its lane in the octet, its octet in the subgroup, its subgroup in the workgroup."""

    lane: Expr
    octet: Expr
    subgroup: Expr
    size: int

    def others(self, value: Expr, lane: int) -> Expr:
        """`value` of a lane of this octet."""
        index = I.int32(lane) if self.size == OCTET else self.octet * OCTET + lane
        return device_calls.subgroup_shuffle(value, index)

    def sum_of_octets(self, sums: Buffer, count: int) -> None:
        """Each lane's numbers become those of its lane in all octets together."""
        step = OCTET
        while step < self.size:
            for i in range(count):
                put(sums, i, sums[i] + device_calls.subgroup_shuffle_xor(sums[i], I.int32(step)))
            step *= 2


def lanes_of(size: int) -> Lanes:
    """The invocation's place; the kernel is then launched with full subgroups of so many lanes only."""
    I.evaluate(device_calls.require_size(size))
    lane = keep(device_calls.lane())
    return Lanes(keep(lane % OCTET), keep(lane // OCTET), keep(device_calls.subgroup_id()), size)


def fitting(op: Op) -> Packed | Declined:
    """The weight of a tagged operation, if octets can read it."""
    weight = packed(op)
    if isinstance(weight, Declined):
        return weight
    whole = weight.group if weight.bits else OCTET
    if whole % OCTET or weight.k % whole or (weight.bits and OCTET % weight.run):
        return Declined(f"words of {weight.run} in {weight.k} columns")
    return weight


@dataclass(frozen=True)
class Weights:
    """The arrays of a weight as vectors, of one expert where `expert` says which."""

    weight: Packed
    arrays: tuple[Buffer, ...]
    lane: Expr
    expert: Expr = 0

    @staticmethod
    def arguments(weight: Packed) -> dict[str, Argument]:
        """The packed arrays."""
        lead = (weight.experts,) if weight.experts else ()
        shapes = [(*lead, weight.blocks, columns, LANES) for columns in _columns(weight)]
        number = "uint32" if weight.pairs else weight.dtype
        if not weight.bits:
            return {"weight": Tensor(shapes[0], number)}
        return {"q_weight": Tensor(shapes[0], "uint32"), "q_scale": Tensor(shapes[1], number)}

    @property
    def steps(self) -> int:
        """Steps that share a scale, or whose scales share a word; 1 for plain weights."""
        w = self.weight
        if not w.bits:
            return 1
        return w.group // OCTET * self._halves

    @property
    def _halves(self) -> int:
        return 2 if self.weight.pairs and self.weight.k // self.weight.group % 2 == 0 else 1

    @property
    def units(self) -> int:
        """Runs of `steps` in a row."""
        return self.weight.k // OCTET // self.steps

    def scales(self, block: Expr, unit: Expr) -> list[list[Expr]]:
        """The scales of a unit's groups, of each the lane's four rows; of a plain weight none."""
        w = self.weight
        if not w.bits:
            return [[]]
        if not w.pairs:
            return [[pin(f32(value)) for value in self._vector(1, block, unit)]]
        words = self._vector(1, block, unit if self._halves == 2 else unit // 2)
        pairs = [_floats(word, signed=False) for word in words]
        if self._halves == 2:
            return [[pin(pair[half]) for pair in pairs] for half in range(2)]
        return [[pin(I.Select(unit % 2 == 0, low, high)) for low, high in pairs]]

    def step(self, block: Expr, step: Expr) -> list[list[Expr]]:
        """What is stored of the lane's rows in eight columns: vectors of four."""
        count = _vectors(self.weight)
        return [self._vector(0, block, step * count + i) for i in range(count)]

    def column(self, stored: list[list[Expr]], j: int, scales: list[Expr]) -> list[Expr]:
        """Column j of a step as float32, in the lane's rows.

        A code of b bits is the upper end of a mantissa of a number from 2**b to 2**(b + 1), 2**b + code: two
        instructions, where a conversion from integers runs at a quarter of the rate (NVIDIA) or needs a mask too.
        """
        w = self.weight
        each = OCTET // len(stored)
        vector, part = stored[j // each], j % each
        if not w.bits:
            return [_floats(word, signed=True)[part] for word in vector] if w.pairs else [f32(x) for x in vector]
        top = 23 - w.bits
        shift = top - w.bits * part
        mask, exponent = I.uint32(((1 << w.bits) - 1) << top), I.uint32((127 + w.bits) << 23)
        found = []
        for word, scale in zip(vector, scales):
            moved = I.shift_left(word, I.uint32(shift)) if shift >= 0 else I.shift_right(word, I.uint32(-shift))
            number = I.reinterpret("float32", I.bitwise_or(I.bitwise_and(moved, mask), exponent))
            found.append((number - I.float32((1 << w.bits) + w.zero_point)) * scale)
        return found

    def _vector(self, array: int, block: Expr, column: Expr) -> list[Expr]:
        """A number of each of the lane's rows."""
        columns = _columns(self.weight)[array]
        blocks = self.weight.blocks
        size = max(1, self.weight.experts) * blocks * columns * LANES
        flat = I.decl_buffer((size,), str(self.arrays[array].dtype), data=self.arrays[array].data)
        line = (self.expert * blocks + block) * columns + column
        return neighbours(flat, line * LANES + self.lane * ROWS, ROWS)


def _columns(w: Packed) -> tuple[int, ...]:
    """Columns of each array."""
    if not w.bits:
        return (ceildiv(w.k, 2) if w.pairs else w.k,)
    groups = -(-w.k // w.group)
    return groups * w.group // w.run, ceildiv(groups, 2) if w.pairs else groups


def _vectors(w: Packed) -> int:
    """Vectors of four that hold a step."""
    if w.bits:
        return OCTET // w.run
    return OCTET // 2 if w.pairs else OCTET


def _floats(word: Expr, signed: bool) -> tuple[Expr, Expr]:
    """Two float16 in a uint32 as float32."""
    parts = I.bitwise_and(word, I.uint32(0xFFFF)), I.shift_right(word, I.uint32(16))
    low, high = (half_to_float(pin(I.cast(part, "int32")), signed) for part in parts)
    return low, high


@dataclass(frozen=True)
class Xs:
    """Rows of x, which begin at `lines` of the buffer `flat`.

    `shuffled`: a lane loads one column of eight. Software adapters load number by number, and shuffle in one
    instruction. GPUs load 16 bytes as fast as 4, and those for the whole subgroup once; theirs are slow shuffles.
    """

    flat: Buffer
    lines: Sequence[Expr]
    lanes: Lanes
    shuffled: bool

    def step(self, step: Expr) -> list[list[Expr]]:
        """What an invocation has of each row in eight columns."""
        if self.shuffled:
            return [[pin(f32(self.flat[line + step * OCTET + self.lanes.lane]))] for line in self.lines]
        return [
            [f32(x) for i in (0, 4) for x in neighbours(self.flat, line + step * OCTET + i, 4)] for line in self.lines
        ]

    def column(self, row: list[Expr], j: int) -> Expr:
        """Column j of a step in one row, float32."""
        return pin(self.lanes.others(row[0], j)) if self.shuffled else row[j]
