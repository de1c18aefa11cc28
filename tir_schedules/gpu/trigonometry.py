"""Sine and cosine for GPUs: those that TVM uses are only accurate for small angles, and positions are large.

WGSL's may be off by 2**-11 and are allowed anything beyond pi (https://www.w3.org/TR/WGSL/#floating-point-accuracy);
CUDA's __sinf has an absolute error of 2**-21.4 within pi and more beyond (CUDA C++ programming guide, mathematical
functions); Metal's fast ones likewise (Metal Shading Language specification, table 8.3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import tirx

from tir_schedules.builder import Expr

# pi / 2 in three parts. The first two have few bits, so their products with small integers are exact.
_HALF_PI = (1.5703125, 4.837512969970703e-4, 7.549789948768648e-8)
# The same in parts of 7 bits, whose products with numbers of up to 17 bits are exact, and the remainder.
_HALF_PI_LONG = (1.5625, 0.0081787109375, 0.00011730194091796875, 3.129243850708008e-07, 9.92093629470503e-10)
# Minimax polynomials on [-pi / 4, pi / 4] in float32 (Moshier, Cephes: sinf.c).
_SIN = (-1.6666654611e-1, 8.3321608736e-3, -1.9515295891e-4)
_COS = (4.166664568298827e-2, -1.388731625493765e-3, 2.443315711809948e-5)


def install() -> None:
    """Lower sines and cosines of float32: error below 2e-7 for angles up to 8192, on CUDA up to 2**17."""
    for name, quarter_turns in (("sin", 0), ("cos", 1)):
        for kind, lower in (
            ("webgpu", _lowering(quarter_turns, _HALF_PI)),
            ("cuda", _lowering(quarter_turns, _HALF_PI_LONG)),
            ("metal", _precise(name)),
        ):
            tirx.register_intrin_lowering(f"tirx.{name}", target=kind, f=lower, level=20)


def _precise(name: str) -> Callable[[Expr], Expr]:
    """Metal's precise function: the polynomials would not survive the fast arithmetic that TVM enables for Metal."""

    def lower(call: Expr) -> Expr:
        return tirx.call_pure_extern("float32", f"precise::{name}", call.args[0]) if _is_f32(call) else call

    return lower


def _is_f32(call: Expr) -> bool:
    return str(call.ty.dtype) == "float32"


def _lowering(quarter_turns: int, half_pi: Sequence[float]) -> Callable[[Expr], Expr]:
    def lower(call: Expr) -> Expr:
        return _sine(call.args[0], quarter_turns, half_pi) if _is_f32(call) else call

    return lower


def _sine(angle: Expr, quarter_turns: int, half_pi: Sequence[float]) -> Expr:
    """sin(angle + quarter_turns * pi / 2)."""

    def number(value: float) -> Expr:
        return tirx.const(value, "float32")

    count = tirx.round(angle * number(0.6366197723675814))
    rest = angle
    for part in half_pi:
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
