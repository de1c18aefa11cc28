"""GGUF's block formats, dequantized to float32 as llama.cpp's reference does, bit for bit.

A tensor is rows of blocks. Each function takes blocks u8[n, bytes] and returns f32[n, elements]. Layouts are those of
the structures in llama.cpp's ggml-common.h, arithmetic that of `dequantize_row_*` in ggml-quants.c.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mlcpipe.checkpoint.gguf import lattices
from mlcpipe.checkpoint.gguf.fields import Bytes, Floats, bit_fields, half, six_bits, trits
from mlcpipe.checkpoint.quantized_matrix import Parts
from mlcpipe.checkpoint.safetensors_reader import CHUNK_ELEMENTS, TensorInfo, fill

_FP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)  # twice the value
_NL = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)


@dataclass(frozen=True)
class BlockFormat:
    """One format: its type number in files, elements and bytes of a block, and the function that dequantizes blocks."""

    name: str
    code: int
    elements: int
    nbytes: int
    dequantize: Callable[[Bytes], Floats]


def chunks(file: io.RawIOBase, info: TensorInfo, flat: Floats) -> Iterator[tuple[int, int]]:
    """Fills `flat` from the blocks of `info` a chunk at a time and yields the bounds of each chunk."""
    form = FORMATS[info.dtype]
    blocks = max(1, CHUNK_ELEMENTS // form.elements)
    step = blocks * form.elements
    buffer = np.empty((blocks, form.nbytes), np.uint8)
    for begin in range(0, flat.size, step):
        end = min(begin + step, flat.size)
        some = buffer[: (end - begin) // form.elements]
        fill(file, some.data.cast("B"), info)
        with np.errstate(invalid="ignore", over="ignore"):  # the caller looks for NaN and infinity
            flat[begin:end] = form.dequantize(some).reshape(-1)
        yield begin, end


def _grouped(scale: Floats, codes: NDArray[np.generic], minimum: Floats | None = None) -> Floats:
    """scale f32[n, g] and codes [n, g * s] -> scale * code - minimum, f32[n, g * s]."""
    n, groups = scale.shape
    result = scale[:, :, None] * codes.reshape(n, groups, -1).astype(np.float32)
    if minimum is not None:
        result -= minimum[:, :, None]
    return result.reshape(n, -1)


def _q4_0(b: Bytes) -> Floats:
    return half(b, 0) * (bit_fields(b[:, 2:], 4, 16).astype(np.float32) - 8)


def _q4_1(b: Bytes) -> Floats:
    return half(b, 0) * bit_fields(b[:, 4:], 4, 16) + half(b, 2)


def _five_bits(low: Bytes, high: Bytes) -> Floats:
    return (bit_fields(low, 4, 16) | bit_fields(high, 1, 1) << 4).astype(np.float32)


def _q5_0(b: Bytes) -> Floats:
    return half(b, 0) * (_five_bits(b[:, 6:], b[:, 2:6]) - 16)


def _q5_1(b: Bytes) -> Floats:
    return half(b, 0) * _five_bits(b[:, 8:], b[:, 4:8]) + half(b, 2)


def _q8_0(b: Bytes) -> Floats:
    return half(b, 0) * b[:, 2:].view(np.int8)


def _q1_0(b: Bytes) -> Floats:
    return half(b, 0) * (2 * bit_fields(b[:, 2:], 1, 1).astype(np.float32) - 1)


def _q2_0(b: Bytes) -> Floats:
    return half(b, 0) * (bit_fields(b[:, 2:], 2, 1).astype(np.float32) - 1)


def _q2_k(b: Bytes) -> Floats:
    scales = b[:, :16]
    return _grouped(half(b, 80) * (scales & 15), bit_fields(b[:, 16:80], 2, 32), half(b, 82) * (scales >> 4))


def _q3_k(b: Bytes) -> Floats:
    scales = bit_fields(b[:, 96:104], 4, 8) | bit_fields(b[:, 104:108], 2, 4) << 4
    codes = bit_fields(b[:, 32:96], 2, 32) | bit_fields(b[:, :32], 1, 32) << 2
    return _grouped(half(b, 108) * (scales.astype(np.float32) - 32), codes.astype(np.float32) - 4)


def _scales_and_minima(b: Bytes) -> tuple[Floats, Floats]:
    """The 8 scales and 8 minima of Q4_K and Q5_K, times those of the super-block."""
    scales, minima = six_bits(b)
    return half(b, 0) * scales, half(b, 2) * minima


def _q4_k(b: Bytes) -> Floats:
    scales, minima = _scales_and_minima(b)
    return _grouped(scales, bit_fields(b[:, 16:], 4, 32), minima)


def _q5_k(b: Bytes) -> Floats:
    scales, minima = _scales_and_minima(b)
    return _grouped(scales, bit_fields(b[:, 48:], 4, 32) | bit_fields(b[:, 16:48], 1, 32) << 4, minima)


def _q6_k(b: Bytes) -> Floats:
    codes = bit_fields(b[:, :128], 4, 64) | bit_fields(b[:, 128:192], 2, 32) << 4
    return _grouped(half(b, 208) * b[:, 192:208].view(np.int8), codes.astype(np.float32) - 32)


def _tq1_0(b: Bytes) -> Floats:
    return half(b, 52) * (trits(b).astype(np.float32) - 1)


def _tq2_0(b: Bytes) -> Floats:
    return half(b, 64) * (bit_fields(b[:, :64], 2, 32).astype(np.float32) - 1)


def _iq4_nl(b: Bytes) -> Floats:
    return half(b, 0) * _NL[bit_fields(b[:, 2:], 4, 16)]


def _iq4_xs(b: Bytes) -> Floats:
    scales = bit_fields(b[:, 4:8], 4, 1) | bit_fields(b[:, 2:4], 2, 1) << 4
    return _grouped(half(b, 0) * (scales.astype(np.float32) - 32), _NL[bit_fields(b[:, 8:], 4, 16)])


def _mxfp4(b: Bytes) -> Floats:
    """A scale of 2^(e - 128), halved for the doubled levels; 255 is NaN."""
    scale: Floats = np.ldexp(np.float32(1), b[:, :1].astype(np.int32) - 128)
    scale[b[:, :1] == 255] = np.nan
    return scale * _FP4[bit_fields(b[:, 1:], 4, 16)]


def _nvfp4(b: Bytes) -> Floats:
    """Four scales of 16 elements: unsigned e4m3, halved for the doubled levels; 127 is zero, more than that NaN."""
    bits = b[:, :4].astype(np.int32)
    exponent, mantissa = bits >> 3, (bits & 7).astype(np.float32)
    scale = np.where(exponent == 0, np.ldexp(mantissa, -10), np.ldexp(8 + mantissa, exponent - 11)).astype(np.float32)
    scale[bits == 127] = 0
    scale[bits > 127] = np.nan
    return _grouped(scale, _FP4[bit_fields(b[:, 4:], 4, 8)])


def _lattice(split: Callable[[Bytes], Parts], levels: tuple[int, ...], unit: float) -> Callable[[Bytes], Floats]:
    """The function that dequantizes blocks of a lattice; all products are exact."""
    table = np.array(levels, np.float32) * np.float32(unit)

    def dequantize(b: Bytes) -> Floats:
        parts = split(b)
        assert parts.subs is not None
        return _grouped(parts.scales.astype(np.float32) * parts.subs, table[parts.codes])

    return dequantize


FORMATS = {
    form.name: form
    for form in (
        BlockFormat("Q4_0", 2, 32, 18, _q4_0),
        BlockFormat("Q4_1", 3, 32, 20, _q4_1),
        BlockFormat("Q5_0", 6, 32, 22, _q5_0),
        BlockFormat("Q5_1", 7, 32, 24, _q5_1),
        BlockFormat("Q8_0", 8, 32, 34, _q8_0),
        BlockFormat("Q2_K", 10, 256, 84, _q2_k),
        BlockFormat("Q3_K", 11, 256, 110, _q3_k),
        BlockFormat("Q4_K", 12, 256, 144, _q4_k),
        BlockFormat("Q5_K", 13, 256, 176, _q5_k),
        BlockFormat("Q6_K", 14, 256, 210, _q6_k),
        BlockFormat("IQ2_XXS", 16, 256, 66, _lattice(lattices.iq2_xxs, lattices.IQ2, 1 / 8)),
        BlockFormat("IQ2_XS", 17, 256, 74, _lattice(lattices.iq2_xs, lattices.IQ2, 1 / 8)),
        BlockFormat("IQ3_XXS", 18, 256, 98, _lattice(lattices.iq3_xxs, lattices.IQ3_XXS, 1 / 4)),
        BlockFormat("IQ1_S", 19, 256, 50, _lattice(lattices.iq1_s, lattices.IQ1, 1 / 8)),
        BlockFormat("IQ4_NL", 20, 32, 18, _iq4_nl),
        BlockFormat("IQ3_S", 21, 256, 110, _lattice(lattices.iq3_s, lattices.IQ3_S, 1)),
        BlockFormat("IQ2_S", 22, 256, 82, _lattice(lattices.iq2_s, lattices.IQ2, 1 / 8)),
        BlockFormat("IQ4_XS", 23, 256, 136, _iq4_xs),
        BlockFormat("IQ1_M", 29, 256, 56, _lattice(lattices.iq1_m, lattices.IQ1, 1 / 8)),
        BlockFormat("TQ1_0", 34, 256, 54, _tq1_0),
        BlockFormat("TQ2_0", 35, 256, 66, _tq2_0),
        BlockFormat("MXFP4", 39, 32, 17, _mxfp4),
        BlockFormat("NVFP4", 40, 64, 36, _nvfp4),
        BlockFormat("Q1_0", 41, 128, 18, _q1_0),
        BlockFormat("Q2_0", 42, 64, 18, _q2_0),
    )
}
