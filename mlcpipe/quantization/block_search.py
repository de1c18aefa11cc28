"""Quantization to block formats with a minimum, such as Q4_K: each group has a scale and a minimum, in bytes.

`search` chooses those of least error (`tir_schedules/cpu/minimum_search.py`; statistics of a matrix's inputs weight the
error of its columns), `rtn` those that span the group. The largest of a block are 127 steps of its two float16 numbers.
Minima are fitted to the rounded scales.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from numpy.typing import NDArray

from mlcpipe.quantization.inputs import Inputs, importance_of
from mlcpipe.quantization.limits import check_magnitude
from mlcpipe.quantization.native_formats import pack_parts
from mlcpipe.quantization.scheme import Scheme
from mlcpipe.quantization.search import CHUNK, host_kernel
from mlcpipe.support.defaults import RTN
from tir_schedules.cpu.minimum_search import minimum_search, nearest_codes

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Lines:
    """Scales and minima of rows as stored: float16[n, 2 * blocks], and their steps int8[n, 2 * groups]."""

    scales: Array
    subs: Array

    def values(self) -> Array:
        """Scale and minimum of each group, float32[n, groups, 2]."""
        n = len(self.scales)
        steps = self.scales.astype(np.float32).reshape(n, -1, 1, 2)
        found: Array = (self.subs.reshape(n, steps.shape[1], -1, 2) * steps).reshape(n, -1, 2)
        return found


def pack(scheme: Scheme, w: Array, name: str, method: str, inputs: Inputs | None = None) -> dict[str, Array]:
    """w float32[N, K], K a multiple of `super_size` -> the arrays of `scheme.shapes`.

    Raises CheckpointError for numbers that are not finite or do not fit float16.
    """
    n, k = w.shape
    shapes = scheme.shapes(n, k)
    arrays = {key: np.empty(shape, dtype) for key, (shape, dtype) in shapes.items()}
    importance, step = importance_of(inputs, k, k, scheme.group_size), max(1, CHUNK // k)
    for start in range(0, n, step):
        rows = np.ascontiguousarray(w[start : start + step], np.float32)
        check_magnitude(np.maximum(rows.max(axis=1), -rows.min(axis=1)), scheme.model_dtype, name)
        lines = fit_lines(scheme, rows, method, importance)
        codes = _codes(scheme, rows.reshape(-1, scheme.group_size), lines.values()).reshape(rows.shape)
        for key, array in pack_parts(scheme, codes, lines.scales, lines.subs).items():
            arrays[key][start : start + step] = array
    return arrays


def fit_lines(scheme: Scheme, rows: Array, method: str, importance: Array) -> Lines:
    """The scales and minima of rows float32[n, K]; `importance` is as `importance_of` gives it."""
    n, size = len(rows), scheme.group_size
    x = rows.reshape(-1, size)
    lines = _best_lines(scheme, x, importance) if method != RTN else _spans(scheme, x)
    lines = lines.reshape(n, -1, scheme.super_size // size, 2)  # scale and minimum of each group of each block
    scales = (np.abs(lines).max(axis=2) / np.float32(127)).astype(np.float16)
    steps = scales.astype(np.float32)[:, :, None]
    subs = in_steps(lines, steps)
    if method != RTN:
        stored = subs * steps
        left = x - _codes(scheme, x, stored) * stored[..., 0].reshape(-1, 1)
        left = left.reshape(-1, *importance.shape)
        lines[..., 1] = ((left * importance).sum(axis=-1) / importance.sum(axis=-1)).reshape(lines.shape[:-1])
        subs = in_steps(lines, steps)
    return Lines(scales.reshape(n, -1), subs.astype(np.int8).reshape(n, -1))


def in_steps(lines: Array, steps: Array) -> Array:
    """Whole numbers of steps, -127 .. 127; 0 where a step is 0."""
    return np.rint(np.divide(lines, steps, out=np.zeros_like(lines), where=steps > 0)).clip(-127, 127)


def _codes(scheme: Scheme, x: Array, stored: Array) -> Array:
    """The nearest codes uint8[groups, size] on the lines of stored scales and minima."""
    return nearest(scheme, x, *stored.reshape(-1, 2).T)
    return nearest(scheme, x, *stored.reshape(-1, 2).T)


def nearest(scheme: Scheme, x: Array, scales: Array, minima: Array) -> Array:
    """The codes uint8[groups, size] whose code * scale + minimum is nearest to x float32[groups, size]."""
    return _run(nearest_codes, scheme, x, scales, minima, np.zeros(x.shape, np.uint8))[-1]


def _best_lines(scheme: Scheme, x: Array, importance: Array) -> Array:
    """Scale and minimum of least error of x float32[groups, size] -> float32[groups, 2]."""
    scale, minimum = (np.zeros(len(x), np.float32) for _ in range(2))
    return np.stack(_run(minimum_search, scheme, x, importance, scale, minimum)[2:], axis=-1)


def _spans(scheme: Scheme, x: Array) -> Array:
    """The same, from the least number to the largest."""
    low, high = x.min(axis=1), x.max(axis=1)
    return np.stack(((high - low) / np.float32((1 << scheme.bits) - 1), low), axis=-1)


def _run(kernel: Any, scheme: Scheme, *arrays: Array) -> list[Array]:
    """The arrays after a kernel ran on copies of them."""
    tensors = [tvm.runtime.tensor(np.ascontiguousarray(array)) for array in arrays]
    _compiled(kernel, scheme.group_size, scheme.bits)(*tensors)
    return [tensor.numpy() for tensor in tensors]


@functools.cache
def _compiled(kernel: Any, size: int, bits: int) -> Any:
    return host_kernel(kernel(size, bits))
