"""GGUF's blocks taken apart: codes, scales and minima as the file has them.

Each function takes blocks u8[n, bytes] and returns the parts of n rows of one block. Minima that llama.cpp subtracts
change sign, because ours are added.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlcpipe.checkpoint.gguf import lattices
from mlcpipe.checkpoint.gguf.fields import Bytes, bit_fields, six_bits, trits, words
from mlcpipe.checkpoint.quantized_matrix import Parts


def _halves(b: Bytes, at: int, count: int = 1) -> NDArray[np.float16]:
    return words(b[:, at : at + 2 * count], "<f2")


def _in_turn(first: NDArray[Any], second: NDArray[Any]) -> NDArray[Any]:
    """[n, m] and [n, m] -> [n, 2 m]: scales and minima in turn."""
    return np.stack([first, second], axis=-1).reshape(len(first), -1)


def _q4_0(b: Bytes) -> Parts:
    return Parts(bit_fields(b[:, 2:], 4, 16), _halves(b, 0))


def _q4_1(b: Bytes) -> Parts:
    return Parts(bit_fields(b[:, 4:], 4, 16), _halves(b, 0, 2))


def _q5_0(b: Bytes) -> Parts:
    return Parts(bit_fields(b[:, 6:], 4, 16) | bit_fields(b[:, 2:6], 1, 1) << np.uint8(4), _halves(b, 0))


def _q5_1(b: Bytes) -> Parts:
    return Parts(bit_fields(b[:, 8:], 4, 16) | bit_fields(b[:, 4:8], 1, 1) << np.uint8(4), _halves(b, 0, 2))


def _q8_0(b: Bytes) -> Parts:
    return Parts(b[:, 2:] ^ np.uint8(128), _halves(b, 0))


def _q2_k(b: Bytes) -> Parts:
    scales = b[:, :16]
    subs = _in_turn(scales & 15, scales >> 4).view(np.int8)
    return Parts(bit_fields(b[:, 16:80], 2, 32), _in_turn(_halves(b, 80), -_halves(b, 82)), subs)


def _q3_k(b: Bytes) -> Parts:
    subs = (bit_fields(b[:, 96:104], 4, 8) | bit_fields(b[:, 104:108], 2, 4) << np.uint8(4)).view(np.int8) - np.int8(32)
    return Parts(bit_fields(b[:, 32:96], 2, 32) | bit_fields(b[:, :32], 1, 32) << np.uint8(2), _halves(b, 108), subs)


def _with_minima(b: Bytes, codes: Bytes) -> Parts:
    """Q4_K and Q5_K: 8 scales and 8 minima of 6 bits each."""
    scales, minima = six_bits(b)
    return Parts(codes, _in_turn(_halves(b, 0), -_halves(b, 2)), _in_turn(scales, minima).view(np.int8))


def _q4_k(b: Bytes) -> Parts:
    return _with_minima(b, bit_fields(b[:, 16:], 4, 32))


def _q5_k(b: Bytes) -> Parts:
    return _with_minima(b, bit_fields(b[:, 48:], 4, 32) | bit_fields(b[:, 16:48], 1, 32) << np.uint8(4))


def _q6_k(b: Bytes) -> Parts:
    codes = bit_fields(b[:, :128], 4, 64) | bit_fields(b[:, 128:192], 2, 32) << np.uint8(4)
    return Parts(codes, _halves(b, 208), b[:, 192:208].view(np.int8))


def _q1_0(b: Bytes) -> Parts:
    return Parts(bit_fields(b[:, 2:], 1, 1), _halves(b, 0))


def _q2_0(b: Bytes) -> Parts:
    return Parts(bit_fields(b[:, 2:], 2, 1), _halves(b, 0))


def _tq1_0(b: Bytes) -> Parts:
    return Parts(trits(b), _halves(b, 52))


def _tq2_0(b: Bytes) -> Parts:
    return Parts(bit_fields(b[:, :64], 2, 32), _halves(b, 64))


def _iq4_nl(b: Bytes) -> Parts:
    return Parts(bit_fields(b[:, 2:], 4, 16), _halves(b, 0))


def _iq4_xs(b: Bytes) -> Parts:
    subs = (bit_fields(b[:, 4:8], 4, 1) | bit_fields(b[:, 2:4], 2, 1) << np.uint8(4)).view(np.int8) - np.int8(32)
    return Parts(bit_fields(b[:, 8:], 4, 16), _halves(b, 0), subs)


def _mxfp4(b: Bytes) -> Parts:
    return Parts(bit_fields(b[:, 1:], 4, 16), b[:, :1].view(np.int8))


def _nvfp4(b: Bytes) -> Parts:
    """e4m3 without a sign: 127 is zero, more than that NaN."""
    scales = b[:, :4].view(np.int8)
    return Parts(bit_fields(b[:, 4:], 4, 8), np.where(scales < 0, np.int8(-1), np.where(scales == 127, 0, scales)))


PARTS: Mapping[str, Callable[[Bytes], Parts]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "Q1_0": _q1_0,
    "Q2_0": _q2_0,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
    "IQ1_S": lattices.iq1_s,
    "IQ1_M": lattices.iq1_m,
    "IQ2_XXS": lattices.iq2_xxs,
    "IQ2_XS": lattices.iq2_xs,
    "IQ2_S": lattices.iq2_s,
    "IQ3_XXS": lattices.iq3_xxs,
    "IQ3_S": lattices.iq3_s,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
}
