"""Sine and cosine for GPUs: WGSL's own may be off by 2**-11, and are allowed anything beyond pi; positions are.

https://www.w3.org/TR/WGSL/#floating-point-accuracy
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx

from tir_schedules.gpu.kernel import Expr

# pi / 2 in three parts, of which the first two have few bits: their products with small integers are exact.
_HALF_PI = (1.5703125, 4.837512969970703e-4, 7.549789948768648e-8)
# Minimax polynomials on [-pi / 4, pi / 4] in float32 (Moshier, Cephes: sinf.c).
_SIN = (-1.6666654611e-1, 8.3321608736e-3, -1.9515295891e-4)
_COS = (4.166664568298827e-2, -1.388731625493765e-3, 2.443315711809948e-5)


def install() -> None:
    """Lower sines and cosines of float32 for WebGPU to polynomials: error below 2e-7 for angles up to 8192."""
    for name, quarter_turns in (("sin", 0), ("cos", 1)):
        tirx.register_intrin_lowering(f"tirx.{name}", target="webgpu", f=_lowering(quarter_turns), level=20)


def _lowering(quarter_turns: int) -> Callable[[Expr], Expr]:
    def lower(call: Expr) -> Expr:
        return _sine(call.args[0], quarter_turns) if str(call.ty.dtype) == "float32" else call

    return lower


def _sine(angle: Expr, quarter_turns: int) -> Expr:
    """sin(angle + quarter_turns * pi / 2)."""

    def number(value: float) -> Expr:
        return tirx.const(value, "float32")

    count = tirx.round(angle * number(0.6366197723675814))
    rest = angle
    for part in _HALF_PI:
        rest = rest - count * number(part)
    square = rest * rest
    sine = rest + rest * square * (number(_SIN[0]) + square * (number(_SIN[1]) + square * number(_SIN[2])))
    cosine = (
        number(1.0)
        - number(0.5) * square
        + square * square * (number(_COS[0]) + square * (number(_COS[1]) + square * number(_COS[2])))
    )
    quadrant = tirx.bitwise_and(count.astype("int32") + quarter_turns, tirx.const(3, "int32"))
    odd = tirx.bitwise_and(quadrant, tirx.const(1, "int32")) == 1
    value = tirx.Select(odd, cosine, sine)
    return tirx.Select(quadrant >= 2, number(0.0) - value, value)
