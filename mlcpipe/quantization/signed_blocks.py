"""Quantization to block formats without a minimum, such as Q6_K and Q8_0: each group has one scale, of either sign.

`search` chooses the scale of least error (`tir_schedules/cpu/scale_search.py`; statistics of a matrix's inputs weight
the error of its columns), `rtn` the one that gives the number of largest magnitude the lowest code. With 8 bits codes
stay within -127 .. 127, as kernels require. If scales are bytes, a block's largest is 127 steps of its float16 number.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import tvm
from numpy.typing import NDArray

from mlcpipe.quantization.block_search import in_steps, nearest
from mlcpipe.quantization.inputs import Inputs, importance_of
from mlcpipe.quantization.limits import check_magnitude
from mlcpipe.quantization.native_formats import pack_parts
from mlcpipe.quantization.scheme import Scheme
from mlcpipe.quantization.search import CHUNK, host_kernel
from mlcpipe.support.defaults import RTN
from tir_schedules.cpu.scale_search import Levels, scale_search

Array = NDArray[Any]

_CODES_PER_WORD = 2  # of the search, whose codes are not used: any divisor of a group


def pack(scheme: Scheme, w: Array, name: str, method: str, inputs: Inputs | None = None) -> dict[str, Array]:
    """w float32[N, K], K whole blocks -> the arrays of `scheme.shapes`.

    Raises CheckpointError for numbers that are not finite or do not fit float16.
    """
    n, k = w.shape
    arrays = {key: np.empty(shape, dtype) for key, (shape, dtype) in scheme.shapes(n, k).items()}
    importance, step = importance_of(inputs, k, k, scheme.group_size), max(1, CHUNK // k)
    for start in range(0, n, step):
        rows = np.ascontiguousarray(w[start : start + step], np.float32)
        check_magnitude(np.maximum(rows.max(axis=1), -rows.min(axis=1)), scheme.model_dtype, name)
        numbers, scales, subs = fit_scales(scheme, rows, method, importance)
        each = numbers.reshape(-1)
        codes = nearest(scheme, rows.reshape(-1, scheme.group_size), each, each * np.float32(-scheme.zero_point))
        for key, array in pack_parts(scheme, codes.reshape(rows.shape), scales, subs).items():
            arrays[key][start : start + step] = array
    return arrays


def fit_scales(scheme: Scheme, rows: Array, method: str, importance: Array) -> tuple[Array, Array, Array | None]:
    """The scales of rows float32[n, K]: as numbers float32[n, groups], and as stored, with their steps int8 if any.

    `importance` is as `importance_of` gives it.
    """
    n, x = len(rows), rows.reshape(-1, scheme.group_size)
    wanted = _best_scales(scheme, x, importance) if method != RTN and scheme.bits < 8 else _spanning(scheme, x)
    if scheme.super_size:
        blocks = wanted.reshape(n, -1, scheme.super_size // scheme.group_size)
        scales = (np.abs(blocks).max(axis=2) / np.float32(127)).astype(np.float16)
        steps = scales.astype(np.float32)[:, :, None]
        subs = in_steps(blocks, steps)
        return (subs * steps).reshape(n, -1), scales.reshape(n, -1), subs.astype(np.int8).reshape(n, -1)
    scales = wanted.astype(np.float16).reshape(n, -1)
    return scales.astype(np.float32), scales, None


def _spanning(scheme: Scheme, x: Array) -> Array:
    """Scales float32[groups] whose outermost code is the number of largest magnitude of x float32[groups, size]."""
    peaks = np.take_along_axis(x, np.abs(x).argmax(axis=1)[:, None], axis=1)[:, 0]
    scales: Array = np.abs(peaks) / np.float32(127) if scheme.bits == 8 else peaks / np.float32(-scheme.zero_point)
    return scales


def _best_scales(scheme: Scheme, x: Array, importance: Array) -> Array:
    """Scales float32[groups] of least error: the kernel's, negated, as it has one more positive level."""
    found = [tvm.runtime.tensor(np.zeros(shape, dtype)) for shape, dtype in (
        ((len(x), scheme.group_size // _CODES_PER_WORD), "uint32"), (len(x), "float32"),
    )]  # fmt: skip
    given = (tvm.runtime.tensor(np.ascontiguousarray(array)) for array in (x, importance))
    _compiled(scheme.bits, scheme.group_size)(*given, *found)
    scales: Array = -found[1].numpy()
    return scales


@functools.cache
def _compiled(bits: int, group_size: int) -> Any:
    zero_point = (1 << (bits - 1)) - 1
    largest = float(np.finfo(np.float16).max)
    return host_kernel(scale_search(Levels(bits, zero_point, group_size, _CODES_PER_WORD, "float32", largest)))
