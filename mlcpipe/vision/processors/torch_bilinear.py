"""Bytes as torch resizes them: bilinear with antialias, weights of 16 bits, rounded to bytes after each pass.

The arithmetic is that of ATen's `upsample_avx_bilinear_bicubic_uint8` (native/cpu/UpSampleKernel.cpp).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]
_MOST_BITS = 22


def bilinear(pixels: Pixels, height: int, width: int) -> Pixels:
    """uint8 [rows, columns, 3] -> uint8 [height, width, 3]: columns first, then rows; a side of equal size stays."""
    if pixels.shape[1] != width:
        pixels = _pass(pixels.transpose(1, 0, 2), width).transpose(1, 0, 2)
    if pixels.shape[0] != height:
        pixels = _pass(pixels, height)
    return np.ascontiguousarray(pixels)


def _pass(pixels: Pixels, count: int) -> Pixels:
    """uint8 [n, m, 3] -> uint8 [count, m, 3]."""
    size = len(pixels)
    starts, weights, bits = _weights(size, count)
    made = np.empty((count, *pixels.shape[1:]), np.uint8)
    for i, (start, row) in enumerate(zip(starts, weights)):
        part = pixels[start : start + len(row)].astype(np.int32)
        total = np.tensordot(row, part, axes=1) + (1 << (bits - 1))
        made[i] = np.clip(total >> bits, 0, 255)
    return made


def _weights(size: int, count: int) -> tuple[list[int], list[NDArray[np.int32]], int]:
    """The first input of each output, the weights of the inputs from there on as integers, and their bits."""
    scale = size / count
    support, inverse = max(scale, 1.0), 1 / max(scale, 1.0)
    starts, found = [], []
    for i in range(count):
        centre = scale * (i + 0.5)
        start = max(int(centre - support + 0.5), 0)
        end = min(int(centre + support + 0.5), size)
        at = np.abs((np.arange(start, end) - centre + 0.5) * inverse)
        triangle = np.where(at < 1, 1 - at, 0.0)
        starts.append(start)
        found.append(triangle / _added(triangle))
    largest, bits = max(float(one.max()) for one in found), 0
    while bits < _MOST_BITS and int(0.5 + largest * (1 << (bits + 1))) < 1 << 15:
        bits += 1
    return starts, [np.floor(one * (1 << bits) + 0.5).astype(np.int32) for one in found], bits


def _added(numbers: NDArray[np.float64]) -> float:
    """The sum, one number after the other."""
    return float(np.cumsum(numbers)[-1])
