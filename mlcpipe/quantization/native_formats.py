"""Schemes of GGUF's block formats and of integers, as `--quantization keep` stores them: every code and scale.

Codes of 5 and 6 bits are two bit planes, of 3 bits too: the upper plane keeps what the lower one cannot. A run of 32
elements fills `bits` words, plane after plane. In a plane of b bits element e of the run has bits (8 j + b t) mod 32
of the plane's word t * b // 8, where t = 2 * (e // 8) + e % 2 and j = e // 2 % 4: a mask gives the codes of four
bytes, and a plane of 4 bits is MLC's order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlcpipe.errors import ConfigError
from mlcpipe.quantization.scheme import Scheme
from tir_schedules.bit_planes import PLANES

Array = NDArray[Any]

RUN = 32  # elements whose words lie together
# Levels of the formats that have a table: those of IQ1 in eighths, of FP4 in halves.
_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
# Those of bitsandbytes in steps of 1 / 124 and 1 / 120, to the nearest.
_NF4 = (-124, -86, -65, -49, -35, -23, -11, 0, 10, 20, 31, 42, 55, 70, 90, 124)
_BNB_FP4 = (0, 1, 80, 120, 40, 60, 20, 30, 0, -1, -80, -120, -40, -60, -20, -30)
_IQ1 = (-9, -7, -1, 1, 7, 9)
_IQ2 = (-43, -25, -8, 8, 25, 43)
_IQ3_XXS = (-62, -52, -44, -36, -28, -20, -12, -4, 4, 12, 20, 28, 36, 44, 52, 62)
_IQ3_S = (-15, -13, -11, -9, -7, -5, -3, -1, 1, 3, 5, 7, 9, 11, 13, 15)


def _scheme(name: str, bits: int, zero: int, group_size: int = RUN, **more: Any) -> Scheme:
    return Scheme(name, "float16", bits, group_size, 32 // bits, zero, **more)


def _table(name: str, bits: int, levels: tuple[int, ...], group_size: int = RUN, **more: Any) -> Scheme:
    return _scheme(name, bits, -min(levels), group_size, table=levels, **more)


SCHEMES: Mapping[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        _scheme("Q4_0", 4, 8),
        _scheme("Q4_1", 4, 0, minima=True),
        _scheme("Q5_0", 5, 16),
        _scheme("Q5_1", 5, 0, minima=True),
        _scheme("Q8_0", 8, 128),
        _scheme("Q2_K", 2, 0, 16, super_size=256, minima=True),
        _scheme("Q3_K", 3, 4, 16, super_size=256),
        _scheme("Q4_K", 4, 0, super_size=256, minima=True),
        _scheme("Q5_K", 5, 0, super_size=256, minima=True),
        _scheme("Q6_K", 6, 32, 16, super_size=256),
        _scheme("TQ1_0", 2, 1, 256),
        _scheme("TQ2_0", 2, 1, 256),
        _scheme("Q2_0", 2, 1, 64),
        _table("Q1_0", 1, (-1, 1), 128),
        _table("IQ1_S", 3, _IQ1, super_size=256, unit=1 / 8),
        _table("IQ1_M", 3, _IQ1, 16, super_size=256, unit=1 / 8),
        _table("IQ2_XXS", 3, _IQ2, super_size=256, unit=1 / 8),
        _table("IQ2_XS", 3, _IQ2, 16, super_size=256, unit=1 / 8),
        _table("IQ2_S", 3, _IQ2, 16, super_size=256, unit=1 / 8),
        _table("IQ3_XXS", 4, _IQ3_XXS, super_size=256, unit=1 / 4),
        _table("IQ3_S", 4, _IQ3_S, super_size=256),
        _table("IQ4_NL", 4, _NL),
        _table("IQ4_XS", 4, _NL, super_size=256),
        _table("MXFP4", 4, _FP4, unit=1 / 2, scale_format="e8m0"),
        _table("NF4", 4, _NF4, 64),
        _table("BNB_FP4", 4, _BNB_FP4, 64),
        _table("NVFP4", 4, _FP4, 16, unit=1 / 2, scale_format="e4m3"),
    )
}


_FORMS = re.compile(r"(?:(int|uint|affine)([234568])|(fp)(4))_(row|g[1-9]\d{0,4})_(f16|bf16|f32)")


def native_scheme(name: str) -> Scheme:
    """The scheme of a block format, or of a form, as `int4_g128_f16`, `affine4_g64_bf16`, `uint8_row_f32`.

    The value of a code c of b bits is (c - 2**(b - 1)) * scale for `int`, (c - zero point) * scale with a zero point
    for each group for `uint`, and c * scale + minimum for `affine`; `fp4` has the levels of MXFP4. Then come the
    columns of a group, 16 or a multiple of 32, and the dtype of scales and minima. Raises ConfigError for another name.
    """
    if name in SCHEMES:
        return SCHEMES[name]
    match = _FORMS.fullmatch(name)
    size = int(match[5][1:]) if match and match[5] != "row" else 0
    if match is None or (size % RUN and size != 16):
        raise ConfigError("weight format", expected="a block format, or integers as int4_g128_f16", found=name)
    bits, half = int(match[2] or match[4]), match[6] == "bf16"
    dtype = "float16" if match[6] == "f16" else "float32"
    table, unit = (_FP4, 1 / 2) if match[3] else ((), 1.0)
    zero = 1 << (bits - 1) if match[1] == "int" else -min(table, default=0)
    return Scheme(name, dtype, bits, size, 32 // bits, zero, minima=match[1] == "affine", zeros=match[1] == "uint",
                  scale_format="bf16" if half else "", table=table, unit=unit)  # fmt: skip


def family_of(name: str) -> str:
    """The name by which kernels list a weight format: its own, or the kind of integers, such as `uint`."""
    match = _FORMS.fullmatch(name)
    return (match[1] or match[3]) if match else name


def pack_codes(codes: Array, bits: int, in_order: bool = False) -> Array:
    """Codes uint8[N, K], K a multiple of 32 -> words uint32[N, K * bits / 32]. `in_order`: bytes are not permuted."""
    n, k = codes.shape
    if in_order:
        return np.ascontiguousarray(codes).view("<u4")
    words = np.zeros((n, k // RUN, bits), np.uint32)
    runs = codes.reshape(n, k // RUN, 4, 4, 2)  # e // 8, j, e % 2
    shift = first = 0
    for plane in PLANES[bits]:
        mask = np.uint8((1 << plane) - 1)
        for t in range(8):
            for j in range(4):
                part = (runs[:, :, t // 2, j, t % 2] >> np.uint8(shift) & mask).astype(np.uint32)
                words[:, :, first + t * plane // 8] |= part << np.uint32(8 * j + plane * t % 8)
        shift, first = shift + plane, first + plane
    return words.reshape(n, -1)


def _in_order(scheme: Scheme) -> bool:
    return scheme.bits == 8 and not scheme.blocked


def pack_parts(scheme: Scheme, codes: Array, scales: Array, more: Array | None) -> dict[str, Array]:
    """Codes uint8[N, K], scales as stored, sub-scales or zero points int8 of a matrix -> arrays of `scheme.shapes`."""
    packed = {"q_weight": pack_codes(codes, scheme.bits, _in_order(scheme)), "q_scale": scales}
    return packed if more is None else {**packed, "q_zero" if scheme.zeros else "q_sub": more}


def unpack_codes(words: Array, bits: int, in_order: bool = False) -> Array:
    """The inverse of `pack_codes`."""
    n = words.shape[0]
    if in_order:
        return np.ascontiguousarray(words).view(np.uint8)
    runs = words.reshape(n, -1, bits)
    codes = np.zeros((n, runs.shape[1], 4, 4, 2), np.uint8)
    shift = first = 0
    for plane in PLANES[bits]:
        mask = np.uint32((1 << plane) - 1)
        for t in range(8):
            for j in range(4):
                part = runs[:, :, first + t * plane // 8] >> np.uint32(8 * j + plane * t % 8) & mask
                codes[:, :, t // 2, j, t % 2] |= part.astype(np.uint8) << np.uint8(shift)
        shift, first = shift + plane, first + plane
    return codes.reshape(n, -1)


def scale_values(scheme: Scheme, scales: Array) -> Array:
    """`q_scale` as numbers, float32."""
    values = scales.astype(np.float32)
    if scheme.scale_format == "bf16":
        values = (scales.astype(np.uint32) << 16).view(np.float32)
    elif scheme.scale_format == "e8m0":
        values = np.ldexp(np.float32(1), scales.view(np.uint8).astype(np.int32) - 127)
    elif scheme.scale_format == "e4m3":  # as float16, whose exponent is 8 higher
        values = (scales.astype(np.uint16) << 7).view(np.float16).astype(np.float32) * np.float32(256)
    result: Array = values * np.float32(scheme.unit)
    return result


def unpack(scheme: Scheme, packed: Mapping[str, Array], k: int) -> Array:
    """Arrays of `scheme.shapes` -> float32[N, k], each value rounded once: the dequantized blocks, bit for bit."""
    codes = unpack_codes(packed["q_weight"], scheme.bits, _in_order(scheme))
    n = len(codes)
    levels = np.array(scheme.table, np.float32)[codes] if scheme.table else codes - np.float32(scheme.zero_point)
    if scheme.zeros:
        zeros = packed["q_zero"].view(np.uint8)
        levels = (levels.reshape(*zeros.shape, -1) - zeros[:, :, None]).reshape(n, -1)
    each = 2 if scheme.minima else 1
    scales = scale_values(scheme, packed["q_scale"]).reshape(n, -1, each)
    if scheme.super_size:
        subs = packed["q_sub"].astype(np.float32).reshape(n, scales.shape[1], -1, each)
        scales = (scales[:, :, None] * subs).reshape(n, -1, each)
    values = levels.reshape(n, scales.shape[1], -1) * scales[:, :, :1]
    if scheme.minima:
        values += scales[:, :, 1:]
    result: Array = values.reshape(n, -1)[:, :k]
    return result
