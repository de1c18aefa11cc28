"""Dequantization of one element of a packed weight as a TVM expression that kernels fuse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from tvm import te, tirx

from mlcpipe.errors import CompileError
from mlcpipe.quantization.layout import Layout
from mlcpipe.quantization.native_formats import RUN
from mlcpipe.quantization.scheme import Scheme
from tir_schedules.bit_planes import PLANES

Index: TypeAlias = "int | tirx.PrimExpr"


def decode_code(scheme: Scheme, word: tirx.PrimExpr, k: Index) -> tirx.PrimExpr:
    """The code, uint32 in 0 .. 2 * zero_point, of column k in the uint32 word that holds it."""
    offset = (k % scheme.codes_per_word) * scheme.bits
    shift = tirx.const(offset, "uint32") if isinstance(offset, int) else offset.astype("uint32")
    return tirx.bitwise_and(tirx.shift_right(word, shift), tirx.const((1 << scheme.bits) - 1, "uint32"))


def dequantize_element(
    scheme: Scheme,
    layout: Layout,
    weight: te.Tensor,
    scale: te.Tensor | None,
    indices: Sequence[Index],
    out_dtype: str,
    sub: te.Tensor | None = None,
) -> tirx.PrimExpr:
    """w[n, k] (indices (n, k)) or w[e, n, k] (indices (e, n, k)) in `out_dtype`.

    `weight` is `q_weight`, `scale` is `q_scale`, `sub` is `q_sub` or `q_zero` where the scheme has it, shaped as
    `layout.shapes(scheme, ...)`; for a plain scheme `weight` is the array itself and `scale` None. The
    value is that of `packing.unpack` rounded to out_dtype: the product is taken in the wider of out_dtype and the
    scale's dtype. Columns from K to the end of the last group hold code 0, which is *not* 0.0: a kernel must not read
    them.

    Raises CompileError if `scale` is missing or superfluous.
    """
    *lead, n, k = indices
    if (scale is None) != (scheme.bits == 0):
        raise CompileError(
            "dequantize_element",
            where=scheme.name,
            expected="a scale" if scheme.bits else "no scale",
            found="none" if scale is None else scale.name,
        )
    if scale is None:
        return _stored(layout, scheme, weight, lead, n, k).astype(out_dtype)
    if scheme.blocked:
        return _block_element(scheme, layout, (weight, scale, sub), lead, n, k).astype(out_dtype)
    word = weight(*lead, *layout.locate(n, k // scheme.codes_per_word))
    s = _stored(layout, scheme, scale, lead, n, k // scheme.group_size if scheme.group_size else 0)
    # Through int32: CPUs before AVX-512 have no conversion from uint32 to float.
    steps = decode_code(scheme, word, k).astype("int32") - tirx.const(scheme.zero_point, "int32")
    wide = "float32" if "float32" in (out_dtype, scheme.model_dtype) else "float16"
    return (steps.astype(wide) * s.astype(wide)).astype(out_dtype)


def _block_element(
    scheme: Scheme,
    layout: Layout,
    arrays: tuple[te.Tensor, te.Tensor, te.Tensor | None],
    lead: Sequence[Index],
    n: Index,
    k: Index,
) -> tirx.PrimExpr:
    """An element of a block format in float32: two roundings at most, of the scaled minimum and of the sum."""
    weight, scale, sub = arrays
    each, span = 2 if scheme.minima else 1, scheme.super_size or scheme.group_size
    group = k // scheme.group_size if scheme.group_size else 0

    def scaled(which: int) -> tirx.PrimExpr:
        stored = _scale(scheme, layout, scale, lead, n, (k // span if span else 0) * each + which)
        if sub is None or scheme.zeros:
            return stored
        return stored * _byte(layout, sub, lead, n, group * each + which).astype("float32")

    code = _plane_code(scheme, layout, weight, lead, n, k)
    steps = _level(scheme.table, code) if scheme.table else code - tirx.const(scheme.zero_point, "int32")
    if scheme.zeros:
        assert sub is not None
        steps = code - _unsigned(_byte(layout, sub, lead, n, group))
    value = steps.astype("float32") * scaled(0)
    return value + scaled(1) if scheme.minima else value


def _scale(
    scheme: Scheme, layout: Layout, scale: te.Tensor, lead: Sequence[Index], row: Index, column: Index
) -> tirx.PrimExpr:
    """An element of `q_scale` in float32, as `native_formats.scale_values` has it."""
    if not scheme.scale_format:
        return _stored(layout, scheme, scale, lead, row, column).astype("float32") * _float(scheme.unit)
    if scheme.scale_format == "bf16":
        return _upper_half(layout, scale, lead, row, column) * _float(scheme.unit)
    byte = _unsigned(_byte(layout, scale, lead, row, column))
    if scheme.scale_format == "e4m3":
        half = tirx.reinterpret("float16", tirx.shift_left(byte, tirx.const(7, "int32")).astype("uint16"))
        return half.astype("float32") * _float(256 * scheme.unit)
    bits = tirx.max(tirx.shift_left(byte, tirx.const(23, "int32")), tirx.const(1 << 22, "int32"))
    return tirx.reinterpret("float32", bits) * _float(scheme.unit)


def _float(value: float) -> tirx.PrimExpr:
    return tirx.const(value, "float32")


def _level(table: tuple[int, ...], code: tirx.PrimExpr) -> tirx.PrimExpr:
    """table[code], int32, of words with the bytes of four levels each."""
    words = np.array([*table, *[0] * (-len(table) % 4)], np.int8).view("<u4")
    word = tirx.const(int(words[-1]), "uint32")
    for i in reversed(range(len(words) - 1)):
        word = tirx.Select(code < 4 * i + 4, tirx.const(int(words[i]), "uint32"), word)
    return tirx.shift_right(word, _shift(code % 4 * 8)).astype("int8").astype("int32")


def _plane_code(
    scheme: Scheme, layout: Layout, weight: te.Tensor, lead: Sequence[Index], n: Index, k: Index
) -> tirx.PrimExpr:
    """The code of column k, int32, from its bit planes: see `native_formats.py`."""
    e, code, first, base = k % RUN, tirx.const(0, "uint32"), 0, 0
    t, j = e // 8 * 2 + e % 2, e // 2 % 4
    for plane in PLANES[scheme.bits]:
        word = weight(*lead, *layout.locate(n, k // RUN * scheme.bits + first + t * plane // 8))
        field = tirx.shift_right(word, _shift(8 * j + plane * t % 8))
        field = tirx.bitwise_and(field, tirx.const((1 << plane) - 1, "uint32"))
        code = tirx.bitwise_or(code, tirx.shift_left(field, tirx.const(base, "uint32")))
        first, base = first + plane, base + plane
    return code.astype("int32")


def _shift(bits: Index) -> tirx.PrimExpr:
    return tirx.const(bits, "uint32") if isinstance(bits, int) else bits.astype("uint32")


def _unsigned(byte: tirx.PrimExpr) -> tirx.PrimExpr:
    """The bits of an int8 as a number from 0 to 255, int32."""
    return tirx.bitwise_and(byte.astype("int32"), tirx.const(255, "int32"))


def _upper_half(layout: Layout, array: te.Tensor, lead: Sequence[Index], row: Index, column: Index) -> tirx.PrimExpr:
    """An element of an array of bfloat16 in float32."""
    if layout.words:
        half = tirx.shift_right(array(*lead, row, column // 2), _shift(column % 2 * 16))
    elif layout.lanes:
        block, x, lane = layout.locate(row, column)
        half = tirx.shift_right(array(*lead, block, x, lane // 2), _shift(lane % 2 * 16))
    else:
        half = array(*lead, *layout.locate(row, column)).astype("uint32")
    return tirx.reinterpret("float32", tirx.shift_left(half, tirx.const(16, "uint32")))


def _byte(layout: Layout, array: te.Tensor, lead: Sequence[Index], row: Index, column: Index) -> tirx.PrimExpr:
    """An element of an array of int8."""
    if layout.words:
        return tirx.shift_right(array(*lead, row, column // 4), _shift(column % 4 * 8)).astype("int8")
    if not layout.lanes:
        return array(*lead, *layout.locate(row, column))
    block, x, lane = layout.locate(row, column)
    return tirx.shift_right(array(*lead, block, x, lane // 4), _shift(lane % 4 * 8)).astype("int8")


def _stored(
    layout: Layout, scheme: Scheme, array: te.Tensor, lead: Sequence[Index], row: Index, column: Index
) -> tirx.PrimExpr:
    """An element of an array of model_dtype."""
    if not layout.pairs or scheme.model_dtype != "float16":
        return array(*lead, *layout.locate(row, column))
    both, upper = array(*lead, *layout.locate(row, column // 2)), column % 2
    shift = tirx.const(16 * upper, "uint32") if isinstance(upper, int) else (upper * 16).astype("uint32")
    return tirx.reinterpret("float16", tirx.shift_right(both, shift).astype("uint16"))
