"""Fields of packed bits, from which all block formats are made."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
_POWERS = np.array([1, 3, 9, 27, 81], np.uint8)


def bit_fields(packed: Bytes, bits: int, width: int) -> Bytes:
    """u8[n, m] -> u8[n, m * 8 / bits]: of each run of `width` bytes the lowest `bits` first, then the next."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    fields: Bytes = packed.reshape(len(packed), -1, 1, width) >> shifts & np.uint8((1 << bits) - 1)
    return fields.reshape(len(packed), -1)


def six_bits(blocks: Bytes) -> tuple[Bytes, Bytes]:
    """The 8 scales and 8 minima, 6 bits each, of Q4_K and Q5_K: u8[n, 8] twice."""
    first, second, last = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([first & 63, last & 15 | first >> 2 & 48], axis=1)
    return scales, np.concatenate([second & 63, last >> 4 | second >> 2 & 48], axis=1)


def trits(blocks: Bytes) -> Bytes:
    """The base-3 digits of TQ1_0, u8[n, 256]: five a byte, four in the last 4 bytes.

    Digit i of a byte is the first one of byte * 3^i mod 256 as a fraction of 256.
    """
    parts = [(blocks[:, :32], 5), (blocks[:, 32:48], 5), (blocks[:, 48:52], 4)]
    shifted = [(part[:, None] * _POWERS[:count, None]).reshape(len(blocks), -1) for part, count in parts]
    return (np.concatenate(shifted, axis=1).astype(np.uint16) * 3 >> 8).astype(np.uint8)


def half(blocks: Bytes, at: int) -> Floats:
    """The float16 at byte `at` of each block -> f32[n, 1]."""
    return words(blocks[:, at : at + 2], "<f2").astype(np.float32)


def words(part: Bytes, dtype: str) -> NDArray[Any]:
    """u8[n, m] as words of `dtype` [n, m / itemsize]."""
    return np.ascontiguousarray(part).view(dtype)
