"""Rounds the columns of a group of a weight one after another, for GPTQ: each makes up for the errors before it.

The arithmetic is `mlcpipe/quantization/gptq.py`'s. 16 rows of the weight are the lanes of a vector.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr, Tensor, function
from tir_schedules.cpu.vectors import read, splat, store, value

LANES = 16
_SPAN = 8  # vectors of rows that a thread takes at a time


def column_rounding(size: int, top: int) -> tirx.PrimFunc:
    """w, due f32[size, n], r f32[size, size], scale, minimum f32[n] -> codes u8[size, n], errors f32[size, n].

    Columns lie in rows; n is a multiple of LANES. `due` is what the columns before the group left to make up for, `r`
    the upper triangular factor of the group, and codes are at most `top`; a scale of 0 gives codes of 0.
    """
    n = tirx.Var("n", "int64")
    columns, line = Tensor((size, n), "float32"), Tensor((n,), "float32")
    arguments = {
        "w": columns,
        "due": columns,
        "r": Tensor((size, size), "float32"),
        "scale": line,
        "minimum": line,
        "codes": Tensor((size, n), "uint8"),
        "errors": columns,
    }

    def body(w: Buffer, due: Buffer, r: Buffer, scale: Buffer, minimum: Buffer, codes: Buffer, errors: Buffer) -> None:
        vectors = n // LANES

        def round_rows(first: Expr) -> None:
            step, least = value(read(scale, first, LANES)), value(read(minimum, first, LANES))
            zero, most = splat(0.0, LANES), splat(float(top), LANES)
            left = I.alloc_buffer((size, LANES), "float32")
            with I.serial(size) as j:
                store(left, (j, 0), read(due, (j, first), LANES), LANES)
            with I.serial(size) as j:
                x = value(read(w, (j, first), LANES))
                wanted = value((x + read(left, (j, 0), LANES) / splat(r[j, j], LANES) - least) / step)
                level = value(I.Select(step == zero, zero, I.min(I.max(I.nearbyint(wanted), zero), most)))
                store(codes, (j, first), I.cast(level, f"uint8x{LANES}"), LANES)
                error = value(x - (level * step + least))
                store(errors, (j, first), error, LANES)
                with I.serial(size - 1 - j) as i:
                    after = j + 1 + i
                    store(left, (after, 0), read(left, (after, 0), LANES) + splat(r[j, after], LANES) * error, LANES)

        with I.parallel((vectors + _SPAN - 1) // _SPAN) as span, I.serial(I.min(_SPAN, vectors - span * _SPAN)) as v:
            round_rows((span * _SPAN + v) * LANES)

    return function("column_rounding", arguments, body)
