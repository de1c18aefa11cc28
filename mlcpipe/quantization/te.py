"""Dequantization as TVM expressions: one element of a packed weight, for a compiler that fuses it into a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from tvm import te, tirx

from mlcpipe.errors import CompileError
from mlcpipe.quantization.layout import Layout
from mlcpipe.quantization.scheme import Scheme

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
) -> tirx.PrimExpr:
    """w[n, k] (indices (n, k)) or w[e, n, k] (indices (e, n, k)) in `out_dtype`.

    `weight` is `q_weight`, `scale` is `q_scale`, shaped as `layout.shapes(scheme, ...)`; for a plain scheme `weight`
    is the array itself and `scale` None. The scale is converted to out_dtype, then multiplied: exact for float32
    and a float16 scale, rounded once for float16 (as MLC-LLM does). Columns from K to the end of the last group
    hold code 0, which is *not* 0.0: a kernel must not read them.

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
        return weight(*lead, *layout.locate(n, k)).astype(out_dtype)
    word = weight(*lead, *layout.locate(n, k // scheme.codes_per_word))
    s = scale(*lead, *layout.locate(n, k // scheme.group_size))
    # Through int32: CPUs before AVX-512 have no conversion from uint32 to float.
    steps = decode_code(scheme, word, k).astype("int32") - tirx.const(scheme.zero_point, "int32")
    return steps.astype(out_dtype) * s.astype(out_dtype)
