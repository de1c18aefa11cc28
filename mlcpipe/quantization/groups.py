"""Group quantization in numpy: codes with one scale per group along K (or per row), bit-identical to MLC-LLM.

The arithmetic, from MLC-LLM's `group_quantization.py` and `utils.py` (`pack_weight`) run by TVM 0.27, with
every operation rounded to the model's dtype:

    w' = w in the model's dtype                      s = max|w'| over the group / zero_point
    code = clip(round(w' / s + zero_point), 0, 2 * zero_point)

The zero point is added *before* rounding. `round` is TVM's `tirx.round`: half to even (llvm.nearbyint on CPU,
RoundEven on Vulkan). A group with scale 0 gets the code of zero; MLC-LLM divides by zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlcpipe.quantization import plain
from mlcpipe.quantization.limits import check_magnitude, row_chunks
from mlcpipe.quantization.scheme import Scheme

Array = NDArray[Any]


def pack(scheme: Scheme, w: Array, name: str) -> dict[str, Array]:
    """w float32[N, K] -> q_weight uint32[N, padded(K) / codes_per_word], q_scale model_dtype[N, groups(K)]."""
    n, k = w.shape
    padded = scheme.padded(k)
    q_weight = np.empty((n, padded // scheme.codes_per_word), np.uint32)
    q_scale = np.empty((n, scheme.groups(k)), scheme.model_dtype)
    for chunk in row_chunks(n, k):
        x = np.zeros((chunk.stop - chunk.start, padded), np.float32)
        x[:, :k] = w[chunk]
        q_scale[chunk] = _scales(scheme, x, name)
        codes = _codes(scheme, x, q_scale[chunk])
        codes[:, k:] = 0
        q_weight[chunk] = words(scheme, codes)
    return {"q_weight": q_weight, "q_scale": q_scale}


def unpack(scheme: Scheme, packed: Mapping[str, Array], k: int) -> Array:
    """The inverse of `pack` up to its rounding: float32[N, k] = (code - zero_point) * scale in float32."""
    q_weight, q_scale = packed["q_weight"], packed["q_scale"]
    n = q_scale.shape[0]
    out = np.empty((n, k), np.float32)
    mask = np.uint32((1 << scheme.bits) - 1)
    for chunk in row_chunks(n, k):
        words = q_weight[chunk]
        x = np.empty((*words.shape, scheme.codes_per_word), np.float32)
        for j in range(scheme.codes_per_word):
            x[:, :, j] = (words >> np.uint32(j * scheme.bits)) & mask
        x -= np.float32(scheme.zero_point)
        grouped = x.reshape(words.shape[0], -1, scheme.group(k))
        grouped *= q_scale[chunk].astype(np.float32)[:, :, None]
        out[chunk] = grouped.reshape(words.shape[0], -1)[:, :k]
    return out


def error_bound(scheme: Scheme, w: Array) -> Array:
    """A bound on |w - unpack(pack(w))| for every element, float32[N, K].

    With s the stored scale, u(x) the spacing of the model's dtype at x and z the zero point, it is

        c(w) + max(s * (1 + u(z) + u(2z)) / 2, z * u(s) / 2) + r

    c is the rounding of w to the model's dtype (`plain.error_bound`). The first term of max is half a step
    plus the roundings of w/s (at most u(z)/2) and of the sum with z (at most u(2z)/2), in steps of s. The second is
    clipping when s was rounded down, relevant only for s near the smallest numbers of the dtype.
    r = z * s * 2^-24 is the float32 product of `unpack` (0 for float16 scales: exact).
    """
    dtype = np.dtype(scheme.model_dtype).type
    z = scheme.zero_point
    step = 0.5 + (float(np.spacing(dtype(z))) + float(np.spacing(dtype(2 * z)))) / 2
    n, k = w.shape
    out = np.empty((n, k), np.float32)
    for chunk in row_chunks(n, k):
        x = np.zeros((chunk.stop - chunk.start, scheme.padded(k)), np.float32)
        x[:, :k] = w[chunk]
        s = _scales(scheme, x, "weight")
        wide = s.astype(np.float64)
        bound = np.maximum(wide * step, np.spacing(s).astype(np.float64) * z / 2)
        if scheme.model_dtype == "float32":
            bound += wide * z * 2.0**-24
        total = np.repeat(bound, scheme.group(k), axis=1)[:, :k]
        total += plain.error_bound(w[chunk], scheme.model_dtype)
        out[chunk] = np.nextafter(total.astype(np.float32), np.float32(np.inf))  # never below the sum
    return out


def _scales(scheme: Scheme, x: Array, name: str) -> Array:
    """Scales model_dtype[rows, groups] of x float32[rows, padded columns]."""
    peaks = np.maximum.reduceat(np.abs(x), np.arange(0, x.shape[1], scheme.group(x.shape[1])), axis=1)
    check_magnitude(peaks, scheme.model_dtype, name)
    # Rounding is monotone: the largest rounded magnitude is the rounded largest magnitude.
    rounded = peaks.astype(scheme.model_dtype).astype(np.float32)
    # float32 has more than twice the digits of float16 (24 >= 2 * 11 + 2). Rounding this quotient
    # again to float16 equals a float16 division.
    scales: Array = (rounded / np.float32(scheme.zero_point)).astype(scheme.model_dtype)
    return scales


def _codes(scheme: Scheme, x: Array, scales: Array) -> Array:
    """Codes uint8[rows, padded columns] of x float32 of the same shape, which is overwritten."""
    half = scheme.model_dtype == "float16"
    if half:
        x[...] = x.astype(np.float16)
    divisor = scales.astype(np.float32)
    # Divided by 1, numbers too small for a scale get the code of zero; they decode to 0 anyway.
    divisor[divisor == 0] = 1
    grouped = x.reshape(x.shape[0], -1, scheme.group(x.shape[1]))
    grouped /= divisor[:, :, None]
    if half:
        _round_to_half(x)
    x += np.float32(scheme.zero_point)
    if half:
        _round_to_half(x)
    np.rint(x, out=x)
    np.clip(x, 0, 2 * scheme.zero_point, out=x)
    return x.astype(np.uint8)


def _round_to_half(x: Array) -> None:
    """Round float32 x in place to the 11 significant bits of float16, half to even.

    Several times faster than numpy's conversion. Valid for numbers below 65504. Numbers below 2^-14 keep more
    digits than float16 has; they vanish when added to a zero point.
    """
    bits = x.view(np.uint32)
    odd = (bits >> np.uint32(13)) & np.uint32(1)
    bits += odd
    bits += np.uint32(0x0FFF)
    bits &= np.uint32(0xFFFFE000)


def words(scheme: Scheme, codes: Array) -> Array:
    """Words uint32[rows, K / codes_per_word] of codes uint8[rows, K]; code j of a word at bits j * bits."""
    by_word = codes.reshape(codes.shape[0], -1, scheme.codes_per_word)
    words = by_word[:, :, 0].astype(np.uint32)
    for j in range(1, scheme.codes_per_word):
        words |= by_word[:, :, j].astype(np.uint32) << np.uint32(j * scheme.bits)
    return words
