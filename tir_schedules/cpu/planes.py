"""Codes in bit planes and their scales, as vectors: see `mlcpipe/quantization/kept.py` for the order of the bits."""

from __future__ import annotations

from collections.abc import Callable

from tvm.script.ir_builder import tirx as I

from tir_schedules.bit_planes import PLANES
from tir_schedules.builder import Buffer, Expr
from tir_schedules.cpu.packed_weight import Packed
from tir_schedules.cpu.vectors import lanes_of, load, read, splat

BYTES, HALVES, ONE = 0x01010101, 0x00010001, 1  # which fields of a word hold codes


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


def sub_scale(subs: Buffer, block: Expr, group: Expr, column: Expr, lanes: int) -> Expr:
    """Sub-scales of `lanes` rows of a block, as float32."""
    words = read(subs, (block, group, column // 4), lanes // 4)
    return I.cast(I.cast(I.reinterpret(lanes_of("int8", lanes), words), lanes_of("int32", lanes)), f"float32x{lanes}")


def scale_of(
    packed: Packed, scales: Buffer, subs: Buffer | None, place: tuple[Expr, Expr, Expr], which: int, lanes: int
) -> Expr:
    """Scales (`which` 0) or minima (1) of a group of `lanes` rows, float32; place: block, group, first row."""
    block, group, column = place
    at = group // (packed.span // packed.group_size)
    scale = load(scales, (block, at * packed.each + which, column), lanes)
    return scale if subs is None else scale * sub_scale(subs, block, group * packed.each + which, column, lanes)
