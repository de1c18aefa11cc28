"""Codes in bit planes and their scales, as vectors: see `quantization/native_formats.py` for the order of the bits."""

from __future__ import annotations

from collections.abc import Callable

from tvm.script.ir_builder import tirx as I

from tir_schedules.bit_planes import PLANES
from tir_schedules.builder import Buffer, Expr
from tir_schedules.cpu.packed_weight import Packed
from tir_schedules.cpu.vectors import Registers, lanes_of, load, read, splat

BYTES, ONE = 0x01010101, 1  # which fields of a word hold codes


def fields(word: Callable[[int], Expr], bits: int, t: int, at: int, every: int, lanes: int) -> Expr:
    """Codes in fields of words uint32[lanes]: the t-th of 8 of the byte at bit `at`, and of those that `every` names.

    `word(i)` is the i-th word of 32 columns, one in each lane.
    """
    code, first, base = None, 0, 0
    for plane in PLANES[bits]:
        shift = at + plane * t % 8 - base
        moved = word(first + t * plane // 8)
        if shift > 0:
            moved = I.shift_right(moved, splat(I.uint32(shift), lanes))
        elif shift < 0:
            moved = I.shift_left(moved, splat(I.uint32(-shift), lanes))
        field = I.bitwise_and(moved, splat(I.uint32(((1 << plane) - 1 << base) * every), lanes))
        code = field if code is None else I.bitwise_or(code, field)
        first, base = first + plane, base + plane
    return code


def chosen(codes: Expr, levels: tuple[int, ...], lanes: int) -> Expr:
    """levels[code] of 4-bit codes in the bytes of words uint32[lanes], on any CPU: halves of the table in turn."""
    bits = (len(levels) - 1).bit_length()
    word, masks = Registers(1, lanes, "uint32"), Registers(2 * bits, lanes, "uint32")
    word[0] = codes
    for bit in range(bits):
        one = I.bitwise_and(I.shift_right(word[0], splat(I.uint32(bit), lanes)), splat(I.uint32(BYTES), lanes))
        masks[2 * bit + 1] = one * splat(I.uint32(255), lanes)
        masks[2 * bit] = I.bitwise_not(masks[2 * bit + 1])

    def half(first: int, bit: int) -> Expr:
        if bit < 0:
            return splat(I.uint32(levels[min(first, len(levels) - 1)] * BYTES), lanes)
        low, high = half(first, bit - 1), half(first + (1 << bit), bit - 1)
        return I.bitwise_or(I.bitwise_and(masks[2 * bit], low), I.bitwise_and(masks[2 * bit + 1], high))

    return half(0, bits - 1)


def _bytes(array: Buffer, block: Expr, group: Expr, column: Expr, lanes: int) -> Expr:
    """A byte of each of `lanes` rows of a block, with its sign as int32."""
    words = read(array, (block, group, column // 4), lanes // 4)
    return I.cast(I.reinterpret(lanes_of("int8", lanes), words), lanes_of("int32", lanes))


def _stored_scale(packed: Packed, scales: Buffer, place: tuple[Expr, Expr, Expr], lanes: int) -> Expr:
    """Numbers of the array of scales, float32; place: block, its column, first row."""
    if not packed.scale_format:
        scale = load(scales, place, lanes)
        return scale if packed.unit == 1 else scale * splat(packed.unit, lanes)
    if packed.scale_format == "bf16":
        block, column, row = place
        halves = I.reinterpret(lanes_of("uint16", lanes), read(scales, (block, column, row // 2), lanes // 2))
        bits = I.shift_left(I.cast(halves, lanes_of("uint32", lanes)), splat(I.uint32(16), lanes))
        return I.reinterpret(lanes_of("float32", lanes), bits)
    byte = _bytes(scales, *place, lanes)
    if packed.scale_format == "e4m3":  # as float16, whose exponent is 8 higher
        half = I.shift_left(I.cast(byte, lanes_of("uint16", lanes)), splat(I.uint16(7), lanes))
        scale = I.cast(I.reinterpret(lanes_of("float16", lanes), half), lanes_of("float32", lanes))
        return scale * splat(256 * packed.unit, lanes)
    # e8m0: the bits of the exponent, of which 0 is 2**-127.
    bits = I.max(I.shift_left(I.bitwise_and(byte, splat(I.int32(255), lanes)), splat(I.int32(23), lanes)),
                 splat(I.int32(1 << 22), lanes))  # fmt: skip
    return I.reinterpret(lanes_of("float32", lanes), bits) * splat(packed.unit, lanes)


def zero_of(packed: Packed, zeros: Buffer, place: tuple[Expr, Expr, Expr], lanes: int) -> Expr:
    """The zero points of a group of `lanes` rows, float32; place: block, group, first row."""
    block, group, column = place
    byte = _bytes(zeros, block, group // (packed.group_size // packed.part), column, lanes)
    return I.cast(I.bitwise_and(byte, splat(I.int32(255), lanes)), lanes_of("float32", lanes))


def scale_of(
    packed: Packed, scales: Buffer, subs: Buffer | None, place: tuple[Expr, Expr, Expr], which: int, lanes: int
) -> Expr:
    """Scales (`which` 0) or minima (1) of a group of `lanes` rows, float32; place: block, group, first row.

    With zero points a minimum is -zero point * scale.
    """
    block, group, column = place
    at = group // (packed.span // packed.part)
    if packed.zeros:
        scale = _stored_scale(packed, scales, (block, at, column), lanes)
        return splat(0.0, lanes) - zero_of(packed, subs, place, lanes) * scale if which else scale
    scale = _stored_scale(packed, scales, (block, at * packed.each + which, column), lanes)
    if subs is None:
        return scale
    return scale * I.cast(_bytes(subs, block, group * packed.each + which, column, lanes), lanes_of("float32", lanes))
