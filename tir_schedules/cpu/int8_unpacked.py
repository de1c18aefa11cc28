"""Columns of a weight as bytes in scratch, once for all rows of a prompt: the codes as they are, and their scales.

Where each group has a zero point of its own it is subtracted from the codes, so that all bytes have one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr
from tir_schedules.cpu.int8_activations import EVEN_ODD, IN_ORDER, Groups
from tir_schedules.cpu.int8_blocks import codes_of, groups_of
from tir_schedules.cpu.int8_dot import Weight
from tir_schedules.cpu.packed_weight import LANES
from tir_schedules.cpu.planes import scale_of, zero_of
from tir_schedules.cpu.vectors import Registers, load, read, splat, store

GROUP = 32  # of weights
_EVERY_BYTE = 0x01010101


def fine_groups(weight: Weight) -> Groups:
    """x in groups of 32, or smaller ones of the weight, for codes as they are stored."""
    w = weight.packed
    if w.blocked:
        return groups_of(weight)
    return Groups(w.k, GROUP, EVEN_ODD if w.bits == 4 else IN_ORDER, weight.dot.zero_point(w.bits, w.zero_point))


def unpacked_groups(weight: Weight) -> Groups:
    """As `fine_groups`, for the bytes of [`unpack`]."""
    groups = fine_groups(weight)
    return replace(groups, zero_point=weight.dot.byte_offset) if weight.packed.zeros else groups


@dataclass(frozen=True)
class Unpacked:
    """Scratch for columns as bytes: words uint32[word, block, 16], and for each group of `size` of K numbers of rows.

    factors f32[group, block, 16 * each]: scales, then minima where the weight has them. With a `side` of 2 two words of
    a row are neighbors: uint32[word / 2, block, 32].
    """

    words: Buffer
    factors: Buffer
    size: int
    side: int = 1

    def factor(self, group: Expr, b: Expr, column: Expr, lanes: int, which: int = 0) -> Expr:
        """Scales (`which` 0) or minima (1) of `lanes` rows of block b, from `column` on."""
        return read(self.factors, (group, b, which * LANES + column), lanes)


def alloc_unpacked(weight: Weight, depth: int, blocks: int, side: int = 1) -> Unpacked:
    """Memory for `depth` of K of some blocks."""
    size, each = unpacked_groups(weight).size, 2 if weight.packed.minima else 1
    words = I.alloc_buffer((depth // 4 // side, blocks, LANES * side), "uint32")
    return Unpacked(words, I.alloc_buffer((depth // size, blocks, LANES * each), "float32"), size, side)


def unpack(weight: Weight, block: Expr, run: Expr, out: Unpacked, slot: Expr, b: Expr) -> None:
    """Emit 32 columns, the run-th, of a block of 16 rows -> the slot-th 32 of block `b` of `out`."""
    packed, lanes = weight.packed, weight.dot.lanes
    parts, words = GROUP // out.size, GROUP * packed.bits // 32
    word, half = Registers(words, lanes, "uint32"), Registers(2, lanes, "uint32")
    with I.unroll(LANES // lanes) as v:
        column = v * lanes
        for i in range(words):
            word[i] = read(weight.words, (block, run * words + i, column), lanes)
        for part in range(parts):
            _put_factors(weight, (block, run * parts + part, column), out, slot * parts + part, b)
        for i in range(4):
            for h in range(2):
                codes = _codes(weight, word, i * 2 + h)
                if packed.zeros:
                    codes = codes + _offset(weight, (block, run * parts + i * parts // 4, column))
                half[h] = I.reinterpret(f"uint32x{lanes}", codes)
            _put_eight(out, slot * 4 + i, b, v, half)


def _codes(weight: Weight, word: Registers, t: int) -> Expr:
    """Bytes [4 * lanes]: the t-th of 8 vectors of codes of 32 columns."""
    packed, dot = weight.packed, weight.dot
    if packed.blocked:
        return codes_of(weight, lambda i: word[i], t)
    parts = 8 // packed.bits
    return dot.codes(word[t // parts], packed.bits, t % parts, packed.zero_point)


def _offset(weight: Weight, place: tuple[Expr, Expr, Expr]) -> Expr:
    """Bytes [4 * lanes] that move codes to the zero point of all bytes, modulo 256."""
    dot, lanes = weight.dot, weight.dot.lanes
    zero = I.cast(zero_of(weight.packed, weight.subs, place, lanes), f"int32x{lanes}")
    moved = I.bitwise_and(splat(I.int32(dot.byte_offset), lanes) - zero, splat(I.int32(255), lanes))
    return I.reinterpret(f"int8x{4 * lanes}", moved * splat(I.int32(_EVERY_BYTE), lanes))


def _put_factors(weight: Weight, place: tuple[Expr, Expr, Expr], out: Unpacked, group: Expr, b: Expr) -> None:
    """Emit the factors of a group of `lanes` rows at `place`: block, group, column."""
    packed, lanes, (block, stored, column) = weight.packed, weight.dot.lanes, place
    if packed.blocked:
        for which in range(packed.each):
            scale = scale_of(packed, weight.scales, weight.subs, place, which, lanes)
            store(out.factors, (group, b, which * LANES + column), scale, lanes)
    else:
        scale = load(weight.scales, (block, stored if packed.groups > 1 else 0, column), lanes)
        store(out.factors, (group, b, column), scale, lanes)


def _put_eight(out: Unpacked, i: Expr, b: Expr, v: Expr, half: Registers) -> None:
    """Emit the i-th eight bytes of the v-th vector of rows of a block, from two vectors of words."""
    lanes = half.lanes
    if out.side == 1:
        with I.unroll(2) as h:
            store(out.words, (i * 2 + h, b, v * lanes), half[h], lanes)
    else:
        both = tirx.Shuffle([half[0], half[1]], [lane + lanes * which for lane in range(lanes) for which in range(2)])
        store(out.words, (i, b, v * 2 * lanes), both, 2 * lanes)
