"""Random numbers by seed and position alone, so that a sampled token does not depend on what ran before."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]  # of 32 bits each
_MASK, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)
_FACTORS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_STEPS = 0x9E3779B9, 0xBB67AE85
_BLOCK = 256  # positions at a time


class Uniforms:
    """Numbers in [0, 1) with 24 bits, for a seed below 2**64 and a position below 2**63; made some at a time.

    Other streams of one seed have other numbers.
    """

    def __init__(self, seed: int, stream: int = 0) -> None:
        self._seed, self._stream = seed, stream
        self._begin, self._numbers = 0, np.zeros(0)

    def at(self, position: int) -> float:
        """The number of a position."""
        if not 0 <= position - self._begin < len(self._numbers):
            self._begin = position
            counter = np.arange(position, position + _BLOCK, dtype=np.uint64)
            words = philox(self._seed, [counter & _MASK, counter >> _SHIFT, np.uint64(self._stream), np.uint64(0)])
            self._numbers = (words[0] >> np.uint64(8)) * 2.0**-24
        return float(self._numbers[position - self._begin])


def philox(key: int, counter: list[Any]) -> list[Words]:
    """Philox4x32-10 of a 64-bit key and four words of counters (Salmon et al. 2011, "Parallel random numbers")."""
    a, b, c, d = counter
    k0, k1 = key & 0xFFFFFFFF, key >> 32
    for _ in range(10):
        first, second = _FACTORS[0] * a, _FACTORS[1] * c
        a, b = second >> _SHIFT ^ b ^ np.uint64(k0), second & _MASK
        c, d = first >> _SHIFT ^ d ^ np.uint64(k1), first & _MASK
        k0, k1 = k0 + _STEPS[0] & 0xFFFFFFFF, k1 + _STEPS[1] & 0xFFFFFFFF
    return [a, b, c, d]
