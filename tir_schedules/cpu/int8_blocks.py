"""Block formats times int8 activations: codes from bit planes, sub-scales, minima and zero points.

Groups of x are those of the weight, at most of 32; a minimum is multiplied with their sum.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Expr
from tir_schedules.cpu.int8_activations import EVEN_ODD, Groups
from tir_schedules.cpu.int8_dot import Weight
from tir_schedules.cpu.planes import BYTES, fields


def groups_of(weight: Weight) -> Groups:
    """x in the weight's groups. `corrections` are sums of x where minima or zero points are multiplied with them."""
    packed = weight.packed
    zero_point = weight.dot.levels(packed)[1] if packed.table else packed.zero_point - byte_shift(weight)
    return Groups(packed.k, packed.part, EVEN_ODD, -1 if packed.shifted else zero_point)


def byte_shift(weight: Weight) -> int:
    """How much less than codes of 8 bits the bytes of `codes_of` are: instructions take signed bytes."""
    return 128 - weight.dot.zero_point(8, 128) if weight.packed.bits == 8 else 0


def codes_of(weight: Weight, words: Callable[[int], Expr], t: int) -> Expr:
    """Bytes [4 * lanes]: the t-th codes of the four bytes of words, or their levels."""
    packed, dot = weight.packed, weight.dot
    if packed.bits == 8:
        return dot.codes(words(t), 8, 0, 128)
    codes = fields(words, packed.bits, t, 0, BYTES, dot.lanes)
    if packed.table:
        codes = dot.look_up(codes, dot.levels(packed)[0])
    return I.reinterpret(f"int8x{4 * dot.lanes}", codes)
