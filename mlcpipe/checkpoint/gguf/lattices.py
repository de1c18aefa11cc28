"""GGUF's IQ1, IQ2 and IQ3 formats: codes that pick 4 or 8 magnitudes from a lattice become one code per element.

`lattices.bin` holds the lattices of llama.cpp's ggml-common.h (MIT license), which no formula gives: `iq2xxs_grid`,
`iq2xs_grid`, `iq2s_grid` and `iq1s_grid`, vectors of 8 with 2 bits an element, then `iq3xxs_grid` and `iq3s_grid`,
vectors of 4 with 4 bits an element; lowest bits first, each element an index of magnitudes, the smallest first.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlcpipe.checkpoint.gguf.fields import Bytes, bit_fields, words
from mlcpipe.checkpoint.quantized_matrix import Parts

# Levels by code, in eighths of the scale, eighths, quarters and wholes. IQ1: -1, 0 and 1 less or more an eighth.
IQ1 = (-9, -7, -1, 1, 7, 9)
IQ2 = (-43, -25, -8, 8, 25, 43)
IQ3_XXS = (-62, -52, -44, -36, -28, -20, -12, -4, 4, 12, 20, 28, 36, 44, 52, 62)
IQ3_S = (-15, -13, -11, -9, -7, -5, -3, -1, 1, 3, 5, 7, 9, 11, 13, 15)
# Name -> vectors, elements of each, bits of an element; in the order of the file.
_LATTICES = {
    "iq2xxs": (256, 8, 2),
    "iq2xs": (512, 8, 2),
    "iq2s": (1024, 8, 2),
    "iq1s": (2048, 8, 2),
    "iq3xxs": (256, 4, 4),
    "iq3s": (512, 4, 4),
}


@cache
def _lattice(name: str) -> Bytes:
    """u8[vectors, elements]."""
    raw = np.fromfile(Path(__file__).with_name("lattices.bin"), np.uint8)
    at = 0
    for other, (vectors, elements, bits) in _LATTICES.items():
        nbytes = vectors * elements * bits // 8
        if other == name:
            return bit_fields(raw[None, at : at + nbytes], bits, 1).reshape(vectors, elements)
        at += nbytes
    raise KeyError(name)


@cache
def _even_signs() -> Bytes:
    """u8[128]: 7 signs as bits, and an eighth that makes the number of minus signs even."""
    low = np.arange(128, dtype=np.uint8)
    parity: Bytes = np.bitwise_xor.reduce(bit_fields(low[:, None], 1, 1), axis=1)
    signs: Bytes = low | parity << np.uint8(7)
    return signs


def _signed(magnitudes: Bytes, signs: Bytes, count: int) -> Bytes:
    """Indices of `count` magnitudes, u8 of any grouping, signs u8[n, m] with a bit an element, 1 for minus -> codes."""
    plus = magnitudes.reshape(len(signs), -1) + np.uint8(count)
    codes: Bytes = np.where(bit_fields(signs, 1, 1) == 1, np.uint8(2 * count - 1) - plus, plus)
    return codes


def _seven_bits(packed: Bytes) -> Bytes:
    """u32 words in u8[n, 4 w] -> u8[n, 4 w]: the four 7-bit indices of signs in each word, looked up."""
    indices = words(packed, "<u4")[:, :, None] >> np.array([0, 7, 14, 21], np.uint32) & 127
    signs: Bytes = _even_signs()[indices.reshape(len(packed), -1)]
    return signs


def _parts(codes: Bytes, scales: Bytes, steps: NDArray[np.integer[Any]]) -> Parts:
    """Scales of two bytes each; sub-scales are 1 + 2 * steps."""
    return Parts(codes, words(scales, "<f2"), (2 * steps + 1).astype(np.int8))


def iq2_xxs(b: Bytes) -> Parts:
    """u8[n, 66] -> parts of 256 elements."""
    pairs = b[:, 2:].reshape(len(b), 8, 8)
    last = np.ascontiguousarray(pairs[:, :, 4:]).reshape(len(b), 32)
    codes = _signed(_lattice("iq2xxs")[pairs[:, :, :4]], _seven_bits(last), 3)
    return _parts(codes, b[:, :2], last[:, 3::4] >> 4)


def iq2_xs(b: Bytes) -> Parts:
    """u8[n, 74] -> parts of 256 elements."""
    codes = words(b[:, 2:66], "<u2")
    signed = _signed(_lattice("iq2xs")[codes & 511], _even_signs()[codes >> 9], 3)
    return _parts(signed, b[:, :2], bit_fields(b[:, 66:], 4, 1))


def iq2_s(b: Bytes) -> Parts:
    """u8[n, 82] -> parts of 256 elements."""
    codes = b[:, 2:34] | bit_fields(b[:, 66:74], 2, 1).astype(np.uint16) << 8
    return _parts(_signed(_lattice("iq2s")[codes], b[:, 34:66], 3), b[:, :2], bit_fields(b[:, 74:], 4, 1))


def iq3_xxs(b: Bytes) -> Parts:
    """u8[n, 98] -> parts of 256 elements."""
    last = b[:, 66:]
    return _parts(_signed(_lattice("iq3xxs")[b[:, 2:66]], _seven_bits(last), 8), b[:, :2], last[:, 3::4] >> 4)


def iq3_s(b: Bytes) -> Parts:
    """u8[n, 110] -> parts of 256 elements."""
    codes = b[:, 2:66] | bit_fields(b[:, 66:74], 1, 1).astype(np.uint16) << 8
    return _parts(_signed(_lattice("iq3s")[codes], b[:, 74:106], 8), b[:, :2], bit_fields(b[:, 106:], 4, 1))


def iq1_s(b: Bytes) -> Parts:
    """u8[n, 50] -> parts of 256 elements."""
    high = words(b[:, 34:], "<u2")
    codes = b[:, 2:34] | ((high[:, :, None] >> np.array([0, 3, 6, 9], np.uint16) & 7) << 8).reshape(len(b), -1)
    return _parts(_raised(codes, np.repeat(high >> 15, 4, axis=1)), b[:, :2], high >> 12 & 7)


def iq1_m(b: Bytes) -> Parts:
    """u8[n, 56] -> parts of 256 elements; the four highest nibbles of the scales are the super-block's float16."""
    packed = words(b[:, 48:], "<u2")
    nibbles = packed >> 12
    bits = nibbles[:, :1] | nibbles[:, 1:2] << 4 | nibbles[:, 2:3] << 8 | nibbles[:, 3:] << 12
    scales = (packed[:, :, None] >> np.array([0, 3, 6, 9], np.uint16) & 7).reshape(len(b), -1)
    high = bit_fields(b[:, 32:48], 4, 1)
    codes = b[:, :32] | (high & 7).astype(np.uint16) << 8
    return _parts(_raised(codes, high >> 3), bits.view(np.uint8), scales)


def _raised(codes: NDArray[np.integer[Any]], less: NDArray[np.integer[Any]]) -> Bytes:
    """Codes of IQ1 from those of its lattice [n, 32]: 8 elements are an eighth less where `less` is 1, else more."""
    raised: Bytes = 2 * _lattice("iq1s")[codes] + (1 - less.astype(np.uint8))[:, :, None]
    return raised.reshape(len(codes), -1)
