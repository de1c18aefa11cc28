"""GPTQ (Frantar et al. 2022): columns are rounded one after another, and later columns compensate for earlier errors.

Of y = x w^T a row q in the place of w has the mean squared error (w - q) H (w - q)^T, where H is the mean of x^T x.
With the upper triangular R of H = R R^T that is |(w - q) R|^2, and its element j depends on the columns up to j alone:
each column is rounded to the level that brings its element nearest to 0. That is what GPTQ does without an inverse of H
(Chen et al. 2025, "The Geometry of LLM Quantization"). Scales have the least error for the columns about to be
rounded, errors of earlier columns included.
It pays where a compilation may take minutes: of all methods it loses least in 4 bits (docs/quality.md).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import tvm
from numpy.typing import NDArray

from mlcpipe.quantization import block_search, groups, search, signed_blocks
from mlcpipe.quantization.inputs import Inputs, importance_of
from mlcpipe.quantization.limits import check_magnitude
from mlcpipe.quantization.native_formats import pack_parts
from mlcpipe.quantization.scheme import Scheme
from mlcpipe.support.defaults import SEARCH
from tir_schedules.cpu.column_rounding import LANES, column_rounding

Array = NDArray[Any]

_DAMPING = 0.01  # of the mean of H's diagonal, added to it
_FACTORED, _UPDATED = 256, 1024  # columns of a factor at a time, and rows of the remainder
_CHUNK = 1 << 23  # elements at a time, of five arrays like them


def applies(scheme: Scheme) -> bool:
    """Whether GPTQ can quantize to a scheme: one whose scales, or scales and minima, are searched."""
    return search.searchable(scheme) and not scheme.table and not scheme.zeros


def pack(scheme: Scheme, w: Array, name: str, inputs: Inputs) -> dict[str, Array]:
    """w float32[N, K], multiplied by `inputs` with their `gram` -> the arrays of `scheme.shapes`.

    Raises CheckpointError for numbers that are not finite or do not fit the dtype.
    """
    n, k = w.shape
    padded = scheme.padded(k)
    factor, importance = triangular_factor(inputs, padded), importance_of(inputs, k, padded, scheme.group_size)
    parts, step = [], max(1, _CHUNK // padded)
    for start in range(0, n, step):
        rows = w[start : start + step]
        check_magnitude(np.maximum(rows.max(axis=1), -rows.min(axis=1)), scheme.model_dtype, name)
        codes, scales, subs = _round(scheme, rows, factor, importance)
        codes[:, k:] = 0
        if scheme.kept:
            parts.append(pack_parts(scheme, codes, scales, subs))
        else:
            parts.append({"q_weight": groups.words(scheme, codes), "q_scale": scales})
    return {key: np.concatenate([one[key] for one in parts]) for key in parts[0]}


def triangular_factor(inputs: Inputs, padded: int) -> Array:
    """The upper triangular R of R R^T = H (damped), float32[padded, padded]; padding does not affect other columns."""
    assert inputs.gram is not None
    k, gram = len(inputs.gram), inputs.gram
    damping = _DAMPING * float(inputs.mean_square.mean()) or 1.0

    def damped(dtype: type) -> Array:
        h: Array = np.zeros((padded, padded), dtype)
        h[:k, :k] = gram
        np.fill_diagonal(h, np.append(gram.diagonal() + dtype(damping), np.ones(padded - k)))
        return h

    try:
        return _upper_factor(damped(np.float32))
    except np.linalg.LinAlgError:
        return _upper_factor(damped(np.float64)).astype(np.float32)


def _upper_factor(h: Array) -> Array:
    """The upper triangular R of R R^T = h, in the place of h: from the last columns on, as fast as matrix products."""
    for end in range(len(h), 0, -_FACTORED):
        begin = max(0, end - _FACTORED)
        block, above = slice(begin, end), slice(0, begin)
        backward = h[block, block][::-1, ::-1]  # whose lower factor, backward again, is upper
        h[block, block] = np.linalg.cholesky(backward)[::-1, ::-1]
        h[block, above] = 0
        h[above, block] = h[above, block] @ np.linalg.inv(h[block, block]).T
        for rows in range(0, begin, _UPDATED):  # in parts: the product needs memory of its own
            part = slice(rows, min(rows + _UPDATED, begin))
            h[part, rows:begin] -= h[part, block] @ h[rows:begin, block].T
    return h


def _round(scheme: Scheme, rows: Array, r: Array, importance: Array) -> tuple[Array, Array, Array | None]:
    """float32[n, K] -> codes uint8[n, padded K], scales and sub-scales as stored."""
    size, width = scheme.group_size, scheme.super_size or scheme.group_size
    n, k = rows.shape
    w = np.zeros((len(r), -(-n // LANES) * LANES), np.float32)  # columns lie in rows here
    w[:k, :n] = rows.T
    errors, codes = np.zeros_like(w), np.empty(w.shape, np.uint8)
    scales, subs = [], []
    for begin in range(0, len(w), width):
        block = slice(begin, begin + width)
        due = r[:begin, block].T @ errors[:begin]
        wanted = w[block] + np.linalg.inv(r[block, block]).T @ due
        known = importance[begin // size : (begin + width) // size]
        lines, *stored = _fit(scheme, np.ascontiguousarray(wanted.T), known)
        scales.append(stored[0])
        subs.extend(stored[1:])
        for i, first in enumerate(range(begin, begin + width, size)):
            group, inside = slice(first, first + size), slice(i * size, (i + 1) * size)
            left = due[inside] + r[begin:first, group].T @ errors[begin:first]
            scale, minimum = lines[:, i].T
            codes[group], errors[group] = _round_group(scheme, w[group], left, r[group, group], scale, minimum)
    found = np.ascontiguousarray(codes[:, :n].T)
    return found, np.concatenate(scales, axis=1)[:n], np.concatenate(subs, axis=1)[:n] if subs else None


def _round_group(scheme: Scheme, *arguments: Array) -> tuple[Array, Array]:
    """The codes and errors of the columns of a group, by `column_rounding`."""
    w = arguments[0]
    arrays = [tvm.runtime.tensor(np.ascontiguousarray(one)) for one in arguments]
    codes, errors = tvm.runtime.empty(w.shape, "uint8"), tvm.runtime.empty(w.shape, "float32")
    _compiled(scheme.group_size, (1 << scheme.bits) - 1)(*arrays, codes, errors)
    return codes.numpy(), errors.numpy()


@cache
def _compiled(size: int, top: int) -> Any:
    return search.host_kernel(column_rounding(size, top))


def _fit(scheme: Scheme, x: Array, importance: Array) -> tuple[Array, ...]:
    """Scales and minima of x float32[n, width] as numbers, float32[n, groups, 2], and as stored."""
    if scheme.kept and not scheme.minima:
        numbers, *stored = signed_blocks.fit_scales(scheme, x, SEARCH, importance)
        lines = np.stack((numbers, -scheme.zero_point * numbers), axis=-1)
        return (lines, *(one for one in stored if one is not None))
    if scheme.kept:
        fitted = block_search.fit_lines(scheme, x, SEARCH, importance)
        return fitted.values(), fitted.scales, fitted.subs
    _, scales = search.search_scales(scheme, x, importance)
    numbers = scales.astype(np.float32)
    return np.stack((numbers, -scheme.zero_point * numbers), axis=-1)[:, None], scales[:, None]
