"""Block formats times int8 activations: codes from bit planes, sub-scales, minima and zero points.

Decode rows: groups of x are those of the weight, at most of 32; a minimum is multiplied with their sum. Prefill rows:
bytes on one scale for a chunk of a row, as in `int8_gemm.py`, in steps of the largest magnitude that its groups can
have / 127; those of a chunk below 1e-30 are zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Expr
from tir_schedules.cpu.int8_activations import EVEN_ODD, SMALLEST, Groups
from tir_schedules.cpu.int8_dot import Weight
from tir_schedules.cpu.int8_unpacked import FRACTION, GROUP, Bytes, halves, upper_bytes
from tir_schedules.cpu.planes import BYTES, HALVES, fields, scale_of
from tir_schedules.cpu.vectors import Registers, read, splat, store


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


def requantize_blocks(
    weight: Weight, block: Expr, chunk: Expr, out: Bytes, slot: Expr, b: Expr, ask: Callable[[Expr], None]
) -> None:
    """Emit a chunk of a block of 16 rows -> a slot of block `b` of `out`, and its scales; as `requantize`."""
    packed, lanes = weight.packed, weight.dot.lanes
    runs, parts = out.size // GROUP, GROUP // packed.part
    top, word = Registers(2, lanes), Registers(packed.bits, lanes, "uint32")
    factor, product = Registers(2, lanes, "int32"), Registers(4, 2 * lanes, "int16")
    half, level, zero = Registers(2, lanes, "uint32"), Registers(2, lanes, "uint32"), splat(0.0, lanes)
    with I.unroll(16 // lanes) as v:

        def scaled(group: Expr, which: int, v: Expr = v) -> Expr:
            at = (block, chunk * (runs * parts) + group, v * lanes)
            return scale_of(packed, weight.scales, weight.subs, at, which, lanes)

        # Step 1: the scale of the chunk, and in top[1] what makes factors of the scales of its groups.
        top[0] = zero
        with I.serial(runs * parts) as g:
            top[0] = I.max(top[0], _reach(weight, scaled(g, 0), scaled(g, 1) if packed.shifted else None))
        store(out.scales, (slot, b, v * lanes), top[0] * splat(1 / 127, lanes), lanes)
        top[1] = I.Select(top[0] > splat(SMALLEST, lanes), splat(FRACTION * 127.0, lanes) / top[0], zero)
        with I.serial(runs) as run:
            ask(run)
            with I.unroll(packed.bits) as i:
                at = (block, (chunk * runs + run) * packed.bits + i, v * lanes)
                word[i] = read(weight.words, at, lanes)
            for w in range(4):
                if w % (4 // parts) == 0:
                    group = run * parts + w * parts // 4
                    minimum = scaled(group, 1) * top[1] if packed.shifted else None
                    _set_factors(weight, scaled(group, 0) * top[1], minimum, factor)
                # Step 2: bytes of eight codes; a product has codes i and i + 4.
                for i, codes in enumerate(_in_halves(weight, lambda j: word[j], w, level)):
                    product[i] = halves(codes, lanes) * halves(factor[0], lanes) + halves(factor[1], lanes)
                for h in range(2):
                    half[h] = upper_bytes(product[h * 2], product[h * 2 + 1], weight.dot)
                out.put_eight(slot * (out.size // 8) + run * 4 + w, b, v, half)


def _in_halves(weight: Weight, words: Callable[[int], Expr], w: int, level: Registers) -> Iterator[Expr]:
    """The w-th eight codes of 32 columns in four vectors, in the lower byte of each half of a lane."""
    packed, lanes = weight.packed, weight.dot.lanes
    if packed.table:
        for t in range(2):
            level[t] = weight.dot.look_up(fields(words, packed.bits, 2 * w + t, 0, BYTES, lanes), packed.levels)
    for at in (0, 8):
        for t in range(2):
            if packed.table:
                moved = I.shift_right(level[t], splat(I.uint32(at), lanes))
                yield I.bitwise_and(moved, splat(I.uint32(255 * HALVES), lanes))
            else:
                yield fields(words, packed.bits, 2 * w + t, at, HALVES, lanes)


def _reach(weight: Weight, scale: Expr, minimum: Expr | None) -> Expr:
    """The largest magnitude that a code of a group can stand for."""
    packed, lanes, highest = weight.packed, weight.dot.lanes, weight.packed.highest
    if minimum is None:
        return I.abs(scale) * splat(float(max(packed.zero_point, highest - packed.zero_point)), lanes)
    return I.max(I.abs(minimum), I.abs(scale * splat(float(highest), lanes) + minimum))


def _set_factors(weight: Weight, ratio: Expr, minimum: Expr | None, factor: Registers) -> None:
    """Emit factor[0], factor[1] so that code * factor[0] + factor[1] is a byte in 8.8 fixed point, modulo 2**16."""
    lanes, dot = weight.dot.lanes, weight.dot
    low = splat(I.int32(0xFFFF), lanes)
    factor[0] = I.cast(I.nearbyint(ratio), f"int32x{lanes}")
    offset = splat(I.int32(FRACTION // 2 + FRACTION * dot.byte_offset), lanes)
    if minimum is not None:
        offset = offset + I.cast(I.nearbyint(minimum), f"int32x{lanes}")
    factor[1] = I.bitwise_and(offset - factor[0] * splat(I.int32(weight.packed.zero_point), lanes), low)
    factor[0] = I.bitwise_and(factor[0], low)
    with I.unroll(2) as i:
        factor[i] = I.bitwise_or(factor[i], I.shift_left(factor[i], splat(I.int32(16), lanes)))
