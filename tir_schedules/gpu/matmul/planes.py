"""Block formats and integers as checkpoints have them: codes in bit planes, tables of levels, scales of scales.

`quantization/native_formats.py` says how they are stored. Eight columns, a step, have their codes in one word of each
plane, or in two words of 8 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm.script.ir_builder import tirx as I

from tir_schedules.bit_planes import PLANES
from tir_schedules.builder import Expr, f32
from tir_schedules.gpu.kernel import half_to_float, pin
from tir_schedules.op import Op

STEP, RUN = 8, 32  # columns whose codes are read together; columns whose words lie together
RUN_STEPS = RUN // STEP
_BYTES = 0x01010101


@dataclass(frozen=True)
class Kept:
    """A block format, or one of integers: code * factor + minimum is a number.

    `group` columns share a scale. `super_size` columns share a scale of scales, 0: none. `levels` are those of a table
    that needs to be looked up, from 0 to 255. `zero` is the code or level of 0.0, and scales are in steps of `unit`.
    `scale_format`: "" float16, bf16, f32, e4m3 or e8m0. `zeros`: each group has a zero point, a byte without a sign.
    `permuted`: codes of 8 bits are in the order of planes.
    """

    bits: int
    group: int
    zero: float
    super_size: int = 0
    minima: bool = False
    levels: tuple[int, ...] = ()
    unit: float = 1.0
    scale_format: str = ""
    zeros: bool = False
    permuted: bool = False

    @property
    def part(self) -> int:
        """Columns that are multiplied before a scale."""
        return min(self.group, RUN)

    @property
    def each(self) -> int:
        """Numbers beside each other for a group: its scale, and its minimum if it has one."""
        return 2 if self.minima else 1

    @property
    def span(self) -> int:
        """Columns that share a number of the array of scales."""
        return self.super_size or self.group

    @property
    def has_subs(self) -> bool:
        """Whether a third array has bytes for each group: sub-scales or zero points."""
        return self.zeros or self.super_size > 0

    @property
    def byte_scales(self) -> bool:
        """Whether scales are bytes."""
        return self.scale_format in ("e4m3", "e8m0")

    @property
    def width(self) -> int:
        """Bits of a code, or of a level."""
        return 8 if self.levels else self.bits

    def words(self, step: Expr) -> dict[int, list[Expr]]:
        """Which of the `bits` words of a run hold the codes of a step, the step-th of four: those of each plane."""
        if self.bits == 8:
            return {8: [step * 2, step * 2 + 1]}
        found, first = {}, 0
        for plane in PLANES[self.bits]:
            found[plane] = [first + (step if plane == 4 else step // 2 if plane == 2 else 0)]
            first += plane
        return found

    def joined(self, words: Sequence[Expr], step: Expr) -> list[Expr]:
        """The words of a step, the step-th of four, with its codes at `place`."""
        if self.bits in (4, 8):
            return list(words)
        planes = PLANES[self.bits]
        aligned = [pin(_aligned(word, plane, step)) for word, plane in zip(words, planes)]
        return aligned if len(planes) == 1 else [pin(_bytes(aligned, planes, parity)) for parity in range(2)]

    def place(self, column: int) -> tuple[int, int]:
        """The word of a column's code, and its lowest bit."""
        if self.bits == 8:
            return (column % 2, column // 2 * 8) if self.permuted else (column // 4, column % 4 * 8)
        planes = PLANES[self.bits]
        return (0, column // 2 * 8 + column % 2 * planes[0]) if len(planes) == 1 else (column % 2, column // 2 * 8)

    def number(self, word: Expr, bit: int) -> Expr:
        """2**width plus a code or level, float32: its bits are the top of the mantissa, see `Weights.column`."""
        if self.levels:
            word, bit = self._looked_up(word, bit), 0
        low = 23 - self.width
        mask, exponent = I.uint32(((1 << self.width) - 1) << low), I.uint32((127 + self.width) << 23)
        return I.reinterpret("float32", I.bitwise_or(I.bitwise_and(_shifted(word, low - bit), mask), exponent))

    def _looked_up(self, word: Expr, bit: int) -> Expr:
        """The level of a code, in the lowest bits: four levels are the bytes of a constant."""
        fours = [self.levels[i : i + 4] for i in range(0, len(self.levels), 4)]
        found = [I.uint32(int.from_bytes(bytes(four), "little")) for four in fours]
        half = 4
        while len(found) > 1:
            is_low = I.bitwise_and(word, I.uint32(half << bit)) == I.uint32(0)
            found = [I.Select(is_low, low, high) for low, high in zip(found[::2], found[1::2])]
            half *= 2
        return I.shift_right(found[0], I.bitwise_and(_shifted(word, 3 - bit), I.uint32(24)))

    def stored_scale(self, byte: Expr) -> Expr:
        """The number of a scale of one byte, int32 from 0 to 255."""
        if self.scale_format == "e4m3":  # as float16, whose exponent is 8 higher
            return half_to_float(I.shift_left(byte, 7), signed=False) * I.float32(256 * self.unit)
        # e8m0: the bits of an exponent, of which 0 is 2**-127.
        return I.reinterpret("float32", I.max(I.shift_left(byte, 23), 1 << 22)) * I.float32(self.unit)

    def in_units(self, scale: Expr) -> Expr:
        """The number of a scale in float32."""
        return scale if self.unit == 1 else scale * I.float32(self.unit)

    def upper_halves(self, word: Expr) -> tuple[Expr, Expr]:
        """The numbers of the two scales in bfloat16 of a word, the lower half first."""
        low, high = I.shift_left(word, I.uint32(16)), I.bitwise_and(word, I.uint32(0xFFFF0000))
        return self.in_units(I.reinterpret("float32", low)), self.in_units(I.reinterpret("float32", high))

    def half_scale(self, half: Expr) -> Expr:
        """The number of a scale or minimum in float16, of its bits as int32."""
        return self.in_units(half_to_float(half, signed=True))


@dataclass(frozen=True)
class Scale:
    """What makes a number of a code: (code - zero) * factor + minimum, float32."""

    factor: Expr
    minimum: Expr | None = None

    def pinned(self) -> Scale:
        return Scale(pin(self.factor), None if self.minimum is None else pin(self.minimum))

    def times(self, sub: Sequence[Expr]) -> Scale:
        """With the sub-scales of a group."""
        return Scale(self.factor * sub[0], None if self.minimum is None else self.minimum * sub[1])

    def less(self, zero: Expr) -> Scale:
        """With a zero point, an int32, which is a minimum of -zero times the scale."""
        return Scale(self.factor, f32(-zero) * self.factor)

    def applied(self, dot: Expr, total: Expr, zero: float) -> Expr:
        """The product of numbers by x, of that of their codes and the sum of x."""
        scaled = (dot - total * I.float32(zero) if zero else dot) * self.factor
        return scaled if self.minimum is None else scaled + total * self.minimum

    def value(self, code: Expr, zero: float) -> Expr:
        """The number of a code."""
        scaled = (code - I.float32(zero)) * self.factor
        return scaled if self.minimum is None else scaled + self.minimum


def kept_of(op: Op) -> Kept | None:
    """The block format of an operation's weight, or its form of integers, if it has one."""
    if "scheme" not in op.facts:
        return None
    table, zero, unit = tuple(map(int, op.str("table").split())), float(op.int("zero_point")), float(op.facts["unit"])
    levels = tuple(level - min(table) for level in table)
    steps = {high - low for low, high in zip(levels, levels[1:])}
    if len(steps) == 1:  # needs no table
        (step,) = steps
        levels, zero, unit = (), zero / step, unit * step
    scale_format = op.str("scale_format") or ("f32" if op.str("dtype") == "float32" else "")
    scales = op.int("super_size"), bool(op.int("minima")), levels, unit, scale_format
    more = bool(op.int("zeros")), bool(op.int("blocked"))
    return Kept(op.int("bits"), op.int("group_size"), zero, *scales, *more)


def byte_of(word: Expr, row: int) -> Expr:
    """The byte of a row of four, as int32 from 0 to 255."""
    return I.cast(I.bitwise_and(_shifted(word, -8 * row), I.uint32(255)), "int32")


def signed_byte_of(word: Expr, row: int) -> Expr:
    """The byte of a row of four, with its sign, as float32."""
    return f32(I.shift_right(I.reinterpret("int32", _shifted(word, 24 - 8 * row)), 24))


def _shifted(word: Expr, bits: int) -> Expr:
    """A word shifted left by so many bits, or right."""
    if not bits:
        return word
    return I.shift_left(word, I.uint32(bits)) if bits > 0 else I.shift_right(word, I.uint32(-bits))


def _aligned(word: Expr, plane: int, step: Expr) -> Expr:
    """A word of a plane with column i of a step from bit 8 (i / 2) + plane (i % 2) on."""
    if isinstance(step, int):
        return _shifted(word, {1: -2 * step, 2: -4 * (step % 2), 4: 0}[plane])
    if plane == 2:
        return I.Select(step % 2 == 0, word, I.shift_right(word, I.uint32(4)))
    return I.shift_right(word, I.cast(step * 2, "uint32")) if plane == 1 else word


def _bytes(words: Sequence[Expr], planes: Sequence[int], parity: int) -> Expr:
    """The codes of the even or odd columns of a step, one in each byte."""
    code, base = I.uint32(0), 0
    for word, plane in zip(words, planes):
        mask = I.uint32(((1 << plane) - 1 << base) * _BYTES)
        field = I.bitwise_and(_shifted(word, base - plane * parity), mask)
        code, base = field if not base else I.bitwise_or(code, field), base + plane
    return code
