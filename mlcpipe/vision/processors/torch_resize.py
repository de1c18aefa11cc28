"""Bytes as torch resizes them with antialias: weights of 16 bits, rounded to bytes after each pass.

The arithmetic is that of ATen's `upsample_avx_bilinear_bicubic_uint8` (native/cpu/UpSampleKernel.cpp).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]
_Numbers = NDArray[np.float64]
_MOST_BITS = 22
_BLOCK = 16  # outputs of one product, whose inputs overlap


def bilinear(pixels: Pixels, height: int, width: int) -> Pixels:
    """As `resized`."""
    return resized(pixels, height, width, 2)


def resized(pixels: Pixels, height: int, width: int, resample: int) -> Pixels:
    """uint8 [rows, columns, 3] -> uint8 [height, width, 3]: columns first, then rows; a side of equal size stays.

    `resample` is Pillow's number of one of FILTERS.
    """
    if pixels.shape[1] != width:
        pixels = _pass(pixels.transpose(1, 0, 2), width, resample).transpose(1, 0, 2)
    if pixels.shape[0] != height:
        pixels = _pass(pixels, height, resample)
    return np.ascontiguousarray(pixels)


def _pass(pixels: Pixels, count: int, resample: int) -> Pixels:
    """uint8 [n, m, 3] -> uint8 [count, m, 3]. The sums are whole numbers below 2**53, which float64 has exactly."""
    size, shape = len(pixels), (count, *pixels.shape[1:])
    starts, weights, bits = _weights(size, count, resample)
    given, made = pixels.reshape(size, -1), np.empty((count, int(np.prod(shape[1:]))), np.uint8)
    for first in range(0, count, _BLOCK):
        rows = range(first, min(first + _BLOCK, count))
        begin = min(starts[i] for i in rows)
        end = max(starts[i] + len(weights[i]) for i in rows)
        block = np.zeros((len(rows), end - begin))
        for row, i in enumerate(rows):
            block[row, starts[i] - begin : starts[i] - begin + len(weights[i])] = weights[i]
        total = block @ given[begin:end].astype(np.float64)
        made[rows.start : rows.stop] = np.clip(np.floor(total / (1 << bits) + 0.5), 0, 255)
    return made.reshape(shape)


def _triangle(at: _Numbers) -> _Numbers:
    return np.where(at < 1, 1 - at, 0.0)


def _cubic(at: _Numbers) -> _Numbers:
    """Keys' kernel with a = -0.5."""
    near, far = (1.5 * at - 2.5) * at * at + 1, ((-0.5 * at + 2.5) * at - 4) * at + 2
    return np.where(at < 1, near, np.where(at < 2, far, 0.0))


def _lanczos(at: _Numbers) -> _Numbers:
    return np.where(at < 3, np.sinc(at) * np.sinc(at / 3), 0.0)


# By Pillow's numbers: half the width, and the weight at a distance.
FILTERS: dict[int, tuple[int, Callable[[_Numbers], _Numbers]]] = {1: (3, _lanczos), 2: (1, _triangle), 3: (2, _cubic)}


def _weights(size: int, count: int, resample: int) -> tuple[list[int], list[_Numbers], int]:
    """The first input of each output, the weights of the inputs from there on as whole numbers, and their bits."""
    half, weight = FILTERS[resample]
    scale = size / count
    support, inverse = half * max(scale, 1.0), 1 / max(scale, 1.0)
    starts, found = [], []
    for i in range(count):
        centre = scale * (i + 0.5)
        start = max(int(centre - support + 0.5), 0)
        end = min(int(centre + support + 0.5), size)
        values = weight(np.abs((np.arange(start, end) - centre + 0.5) * inverse))
        starts.append(start)
        found.append(values / _added(values))
    largest, bits = max(float(one.max()) for one in found), 0
    while bits < _MOST_BITS and int(0.5 + largest * (1 << (bits + 1))) < 1 << 15:
        bits += 1
    whole = [one * (1 << bits) for one in found]
    return starts, [np.trunc(one + np.copysign(0.5, one)) for one in whole], bits


def _added(numbers: _Numbers) -> float:
    """The sum, one number after the other."""
    return float(np.cumsum(numbers)[-1])
