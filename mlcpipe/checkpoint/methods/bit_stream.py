"""Codes in a stream of bits, the lowest first, as GPTQ, compressed-tensors and MLX pack them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

RUN = 32  # codes that fill whole words


def unpack_stream(words: NDArray[Any], bits: int, count: int) -> NDArray[np.uint8]:
    """Words of 32 bits [N, at least count * bits / 32] -> codes uint8[N, count]; a code may lie in two words."""
    n, width = words.shape
    runs = -(-count // RUN)
    stream = np.zeros((n, runs * bits), np.uint32)
    used = min(width, runs * bits)
    stream[:, :used] = words[:, :used].view(np.uint32)
    codes = np.empty((n, runs, RUN), np.uint8)
    by_run, mask = stream.reshape(n, runs, bits), np.uint32((1 << bits) - 1)
    for i in range(RUN):
        word, shift = divmod(i * bits, 32)
        code = by_run[:, :, word] >> np.uint32(shift)
        if shift + bits > 32:
            code |= by_run[:, :, word + 1] << np.uint32(32 - shift)
        codes[:, :, i] = code & mask
    return codes.reshape(n, runs * RUN)[:, :count]
