"""GGUF's IQ1, IQ2 and IQ3 formats: a code chooses 4 or 8 magnitudes from a lattice.

`lattices.bin` holds the lattices of llama.cpp's ggml-common.h (MIT license), which no formula gives: `iq2xxs_grid`,
`iq2xs_grid`, `iq2s_grid` and `iq1s_grid`, vectors of 8 with 2 bits an element, then `iq3xxs_grid` and `iq3s_grid`,
vectors of 4 with 4 bits an element; lowest bits first, each element an index of the levels in `_LATTICES`.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np

from mlcpipe.checkpoint.gguf.fields import Bytes, Floats, bit_fields, half, words

_IQ2_LEVELS = (8, 25, 43)
# Name -> vectors, elements of each, bits of an element, levels; in the order of the file.
_LATTICES = {
    "iq2xxs": (256, 8, 2, _IQ2_LEVELS),
    "iq2xs": (512, 8, 2, _IQ2_LEVELS),
    "iq2s": (1024, 8, 2, _IQ2_LEVELS),
    "iq1s": (2048, 8, 2, (-1, 0, 1)),
    "iq3xxs": (256, 4, 4, (4, 12, 20, 28, 36, 44, 52, 62)),
    "iq3s": (512, 4, 4, (1, 3, 5, 7, 9, 11, 13, 15)),
}
_DELTA = np.float32(0.125)


@cache
def _lattice(name: str) -> Floats:
    """f32[vectors, elements]."""
    raw = np.fromfile(Path(__file__).with_name("lattices.bin"), np.uint8)
    at = 0
    for other, (vectors, elements, bits, levels) in _LATTICES.items():
        nbytes = vectors * elements * bits // 8
        if other == name:
            codes = bit_fields(raw[None, at : at + nbytes], bits, 1)
            table: Floats = np.array(levels, np.float32)[codes].reshape(vectors, elements)
            return table
        at += nbytes
    raise KeyError(name)


@cache
def _even_signs() -> Bytes:
    """u8[128]: 7 signs as bits, and an eighth that makes the number of minus signs even."""
    low = np.arange(128, dtype=np.uint8)
    parity: Bytes = np.bitwise_xor.reduce(bit_fields(low[:, None], 1, 1), axis=1)
    signs: Bytes = low | parity << np.uint8(7)
    return signs


def _signed(scale: Floats, magnitudes: Floats, signs: Bytes) -> Floats:
    """scale f32[n, g], magnitudes of any grouping, signs u8[n, m] with a bit an element, 1 for minus -> f32[n, 8 m]."""
    n, groups = scale.shape
    result = scale[:, :, None] * magnitudes.reshape(n, groups, -1)
    minus = bit_fields(signs, 1, 1).reshape(result.shape)
    return np.where(minus == 1, -result, result).reshape(n, -1)


def _seven_bits(packed: Bytes) -> Bytes:
    """u32 words in u8[n, 4 w] -> u8[n, 4 w]: the four 7-bit indices of signs in each word, looked up."""
    indices = words(packed, "<u4")[:, :, None] >> np.array([0, 7, 14, 21], np.uint32) & 127
    signs: Bytes = _even_signs()[indices.reshape(len(packed), -1)]
    return signs


def iq2_xxs(b: Bytes) -> Floats:
    """u8[n, 66] -> f32[n, 256]."""
    pairs = b[:, 2:].reshape(len(b), 8, 8)
    last = np.ascontiguousarray(pairs[:, :, 4:]).reshape(len(b), 32)
    scale = half(b, 0) * (np.float32(0.5) + (last[:, 3::4] >> 4)) * np.float32(0.25)
    return _signed(scale, _lattice("iq2xxs")[pairs[:, :, :4]], _seven_bits(last))


def iq2_xs(b: Bytes) -> Floats:
    """u8[n, 74] -> f32[n, 256]."""
    codes = words(b[:, 2:66], "<u2")
    scale = half(b, 0) * (np.float32(0.5) + bit_fields(b[:, 66:], 4, 1)) * np.float32(0.25)
    return _signed(scale, _lattice("iq2xs")[codes & 511], _even_signs()[codes >> 9])


def iq2_s(b: Bytes) -> Floats:
    """u8[n, 82] -> f32[n, 256]."""
    codes = b[:, 2:34] | bit_fields(b[:, 66:74], 2, 1).astype(np.uint16) << 8
    scale = half(b, 0) * (np.float32(0.5) + bit_fields(b[:, 74:], 4, 1)) * np.float32(0.25)
    return _signed(scale, _lattice("iq2s")[codes], b[:, 34:66])


def iq3_xxs(b: Bytes) -> Floats:
    """u8[n, 98] -> f32[n, 256]."""
    last = b[:, 66:]
    scale = half(b, 0) * (np.float32(0.5) + (last[:, 3::4] >> 4)) * np.float32(0.5)
    return _signed(scale, _lattice("iq3xxs")[b[:, 2:66]], _seven_bits(last))


def iq3_s(b: Bytes) -> Floats:
    """u8[n, 110] -> f32[n, 256]."""
    codes = b[:, 2:66] | bit_fields(b[:, 66:74], 1, 1).astype(np.uint16) << 8
    scale = half(b, 0) * (1 + 2 * bit_fields(b[:, 106:], 4, 1).astype(np.float32))
    return _signed(scale, _lattice("iq3s")[codes], b[:, 74:106])


def iq1_s(b: Bytes) -> Floats:
    """u8[n, 50] -> f32[n, 256]."""
    high = words(b[:, 34:], "<u2")
    codes = b[:, 2:34] | ((high[:, :, None] >> np.array([0, 3, 6, 9], np.uint16) & 7) << 8).reshape(len(b), -1)
    scale = half(b, 0) * (2 * (high >> 12 & 7) + 1).astype(np.float32)
    delta: Floats = np.where(high >> 15 == 0, _DELTA, -_DELTA)
    levels: Floats = _lattice("iq1s")[codes].reshape(len(b), 8, 32) + delta[:, :, None]
    return (scale[:, :, None] * levels).reshape(len(b), -1)


def iq1_m(b: Bytes) -> Floats:
    """u8[n, 56] -> f32[n, 256]; the four highest nibbles of the scales are the super-block's float16."""
    packed = words(b[:, 48:], "<u2")
    nibbles = packed >> 12
    bits = nibbles[:, 0] | nibbles[:, 1] << 4 | nibbles[:, 2] << 8 | nibbles[:, 3] << 12
    super_scale = bits.astype("<u2").view("<f2").astype(np.float32)[:, None]
    scales = (packed[:, :, None] >> np.array([0, 3, 6, 9], np.uint16) & 7).reshape(len(b), -1)
    high = bit_fields(b[:, 32:48], 4, 1)
    codes = b[:, :32] | (high & 7).astype(np.uint16) << 8
    delta: Floats = np.where(high & 8 == 0, _DELTA, -_DELTA)
    levels: Floats = _lattice("iq1s")[codes] + delta[:, :, None]
    scale = super_scale * (2 * scales + 1).astype(np.float32)
    return (scale[:, :, None] * levels.reshape(len(b), 16, 16)).reshape(len(b), -1)
