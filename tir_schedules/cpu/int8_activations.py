"""Dynamic quantization of activations for integer dot products: int8, one scale for 32 numbers of a row.

x is about q * scale with q = round(x / scale), scale = max|x| / 127 over the 32 (symmetric, so that zero is exact):
an element is off by at most scale / 2. Groups whose largest magnitude is below 1e-30 become zeros; a NaN or an
infinity makes the scale of its group NaN, and so every result that reads the group.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

GROUP = 32
SMALLEST, LARGEST = 1e-30, 3.4e38
MAGNITUDE = 0x7FFFFFFF
# Order of a row's numbers in 16 bytes: `part` 0 and 1 of words with eight 4-bit codes, or as they come.
_EVEN_ODD = (0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15)


def _ordered(x: tirx.PrimExpr, bits: int) -> tirx.PrimExpr:
    """int8[16] in the order in which `Dot.codes` hands out the codes of a word."""
    return tirx.Shuffle([x], list(_EVEN_ODD)) if bits == 4 else x


@T.macro
def quantize_group(X, row, g, k_size, bits, zero_point, Q, scales, corrections, panel, r):
    """Quantize X[row, 32 g : 32 g + 32] into Q[panel, 8 g : 8 g + 8, r] (four numbers a word), scales[panel, g, r]
    and corrections[panel, g, r] = -zero_point * sum(q). Numbers past `k_size` are zeros.
    """
    x = T.alloc_buffer((2, 16), "float32")
    top = T.alloc_buffer((1, 16), "int32")
    q = T.alloc_buffer((2, 16), "int32")
    word = T.alloc_buffer((8,), "int32")
    peak = T.alloc_buffer((2,), "float32")
    if k_size % 32 == 0 or g < k_size // 32:
        for i in T.unroll(2):
            x[i, T.ramp(0, 1, 16)] = X[row, T.ramp(g * 32 + i * 16, 1, 16)]
    else:
        for i in T.unroll(2):
            x[i, T.ramp(0, 1, 16)] = T.broadcast(T.float32(0), 16)
        for i in T.serial(k_size % 32):
            x[i // 16, i % 16] = X[row, k_size // 32 * 32 + i]
    # As integers magnitudes order as numbers do, and NaN is the largest.
    top[0, T.ramp(0, 1, 16)] = T.max(
        T.bitwise_and(T.reinterpret(x[0, T.ramp(0, 1, 16)], dtype="int32x16"), T.broadcast(T.int32(MAGNITUDE), 16)),
        T.bitwise_and(T.reinterpret(x[1, T.ramp(0, 1, 16)], dtype="int32x16"), T.broadcast(T.int32(MAGNITUDE), 16)),
    )
    peak[0] = T.reinterpret(
        T.call_llvm_pure_intrin(
            T.llvm_lookup_intrinsic_id("llvm.vector.reduce.smax"), top[0, T.ramp(0, 1, 16)], dtype="int32"
        ),
        dtype="float32",
    )
    peak[1] = T.Select(peak[0] > T.float32(SMALLEST), T.float32(127) / peak[0], T.float32(0))
    scales[panel, g, r] = T.Select(peak[0] < T.float32(LARGEST), peak[0] * T.float32(1 / 127), T.float32(float("nan")))
    for i in T.unroll(2):
        q[i, T.ramp(0, 1, 16)] = T.cast(T.nearbyint(x[i, T.ramp(0, 1, 16)] * T.broadcast(peak[1], 16)), "int32x16")
        word[T.ramp(i * 4, 1, 4)] = T.reinterpret(
            _ordered(T.cast(q[i, T.ramp(0, 1, 16)], "int8x16"), bits), dtype="int32x4"
        )
    corrections[panel, g, r] = T.int32(-zero_point) * T.call_llvm_pure_intrin(
        T.llvm_lookup_intrinsic_id("llvm.vector.reduce.add"),
        q[0, T.ramp(0, 1, 16)] + q[1, T.ramp(0, 1, 16)],
        dtype="int32",
    )
    for i in T.unroll(8):
        Q[panel, g * 8 + i, r] = word[i]
