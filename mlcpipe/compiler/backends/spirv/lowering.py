"""Math functions for TVM's target kind `vulkan`: SPIR-V instructions where they are good enough, otherwise TensorIR.

Vulkan's precision (https://registry.khronos.org/vulkan/specs/1.2/html/vkspec.html#spirvenv-op-prec) allows sine and
cosine an error of 2**-11, leaves them undefined beyond pi, and leaves powers of negative numbers undefined. On some
drivers hyperbolic tangents overflow: they are made of exponentials.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tvm import tirx

from mlcpipe.compiler.backends.spirv.intrinsics import PREFIX

Expr = Any
_LEVEL = 20  # above TVM's own rules
_DIRECT = (
    "exp", "exp2", "log", "log2", "tan", "sinh", "cosh", "atan", "atan2", "asinh", "acosh", "atanh",
    "sqrt", "rsqrt", "fabs", "floor", "ceil", "trunc", "round", "nearbyint", "fma", "popcount", "clz", "isnan", "isinf",
    "fmod",
)  # fmt: skip
# pi / 2 as a sum: parts of 7 bits, whose products with numbers of up to 17 bits are exact, and the remainder.
_HALF_PI = (1.5625, 0.0081787109375, 0.00011730194091796875, 3.129243850708008e-07, 9.92093629470503e-10)
# Minimax polynomials on [-pi / 4, pi / 4] in float32 (Moshier, Cephes: sinf.c).
_SIN = (-1.6666654611e-1, 8.3321608736e-3, -1.9515295891e-4)
_COS = (4.166664568298827e-2, -1.388731625493765e-3, 2.443315711809948e-5)
# erf(x) = 1 - t (...) exp(-x**2), t = 1 / (1 + p x), x >= 0: Abramowitz and Stegun 7.1.26, error below 1.5e-7.
_ERF_P = 0.3275911
_ERF = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)
_PRIM = ("log2", "ceil", "clz")  # operators in TVM's namespace `prim.`
_POWERS = 16  # powers with integer exponents up to this become products


@functools.cache
def install() -> None:
    """Register the rules with TVM, above its own; only once, because TVM refuses a second registration."""
    for name in _DIRECT:
        _register(name, _direct(name))
    for name, rule in (
        ("sin", lambda call: _sine(call, 0)),
        ("cos", lambda call: _sine(call, 1)),
        ("tanh", _tanh),
        ("erf", _erf),
        ("asin", lambda call: _arc(call, lambda x, other: (x, other))),
        ("acos", lambda call: _arc(call, lambda x, other: (other, x))),
        ("pow", _pow),
        ("log10", lambda call: tirx.log2(call.args[0]) * tirx.const(0.30102999566398120, _dtype(call))),
        ("exp10", lambda call: tirx.exp2(call.args[0] * tirx.const(3.3219280948873623, _dtype(call)))),
        ("log1p", _log1p),
    ):
        _register(name, rule)


def _register(name: str, rule: Callable[[Expr], Expr]) -> None:
    namespace = "prim" if name in _PRIM else "tirx"
    tirx.register_intrin_lowering(f"{namespace}.{name}", target="vulkan", f=rule, level=_LEVEL)


def _dtype(call: Expr) -> str:
    return str(call.ty.dtype)


def _numbers(dtype: str) -> Callable[[float], Expr]:
    return lambda value: tirx.const(value, dtype)


def _extern(name: str, like: Expr, *args: Expr) -> Expr:
    return tirx.call_pure_extern(_dtype(like), name, *args)


def _direct(name: str) -> Callable[[Expr], Expr]:
    return lambda call: _extern(name, call, *call.args)


def _exact(expr: Expr) -> Expr:
    return _extern(PREFIX + "exact", expr, expr)


def _polynomial(x: Expr, coefficients: tuple[float, ...]) -> Expr:
    """c0 + x (c1 + x (...))."""
    total = tirx.const(coefficients[-1], _dtype(x))
    for value in reversed(coefficients[:-1]):
        total = tirx.const(value, _dtype(x)) + x * total
    return total


def _named(value: Expr, body: Callable[[Expr], Expr]) -> Expr:
    """`body` applied to a value that is computed only once."""
    var = tirx.Var("v", _dtype(value))
    return tirx.Let(var, value, body(var))


def _sine(call: Expr, quarter_turns: int) -> Expr:
    """sin(x + quarter_turns * pi / 2): error below 2e-7 for |x| up to 2e5; float16 is computed in float32."""
    dtype = _dtype(call)
    if dtype.startswith("float16"):
        wide = call.args[0].astype(dtype.replace("float16", "float32"))
        return _sine_of(wide, quarter_turns).astype(dtype)
    return _sine_of(call.args[0], quarter_turns)


def _sine_of(angle: Expr, quarter_turns: int) -> Expr:
    dtype = _dtype(angle)
    integer = dtype.replace("float", "int")
    number = _numbers(dtype)

    def reduced(turns: Expr) -> Expr:
        rest = angle
        for part in _HALF_PI:
            rest = rest - turns * number(part)
        return _named(_exact(rest), lambda r: _named(r * r, lambda square: chosen(turns, r, square)))

    def chosen(turns: Expr, rest: Expr, square: Expr) -> Expr:
        sine = rest + rest * square * _polynomial(square, _SIN)
        cosine = number(1.0) - number(0.5) * square + square * square * _polynomial(square, _COS)
        quadrant = turns.astype(integer) + tirx.const(quarter_turns, integer)
        odd = tirx.bitwise_and(quadrant, tirx.const(1, integer)) == tirx.const(1, integer)
        negative = tirx.bitwise_and(quadrant, tirx.const(2, integer)) == tirx.const(2, integer)
        return _named(tirx.Select(odd, cosine, sine), lambda v: tirx.Select(negative, number(0.0) - v, v))

    return _named(tirx.round(angle * number(0.6366197723675814)), reduced)


def _tanh(call: Expr) -> Expr:
    """x - x**3 / 3 + ... near 0, elsewhere 1 - 2 / (exp(2 |x|) + 1) with the sign of x; relative error below 4e-7."""
    dtype = _dtype(call)
    number = _numbers(dtype)

    def body(x: Expr) -> Expr:
        size = tirx.Select(x < number(0.0), number(0.0) - x, x)
        large = number(1.0) - number(2.0) / (tirx.exp(number(2.0) * size) + number(1.0))
        square = x * x
        # Taylor's series up to x**11: error below 1.1e-8 for |x| <= 0.3
        series = (1.0, -1 / 3, 2 / 15, -17 / 315, 62 / 2835, -1382 / 155925)
        small = x * _polynomial(square, series)
        return tirx.Select(size < number(0.3), small, tirx.Select(x < number(0.0), number(0.0) - large, large))

    return _named(call.args[0], body)


def _arc(call: Expr, order: Callable[[Expr, Expr], tuple[Expr, Expr]]) -> Expr:
    """asin or acos: atan2 of x and sqrt(1 - x**2), in either order."""
    one = tirx.const(1.0, _dtype(call))
    return _named(
        call.args[0], lambda x: _extern("atan2", call, *order(x, _extern("sqrt", call, (one - x) * (one + x))))
    )


def _erf(call: Expr) -> Expr:
    """Absolute error below 5e-7."""
    dtype = _dtype(call)
    number = _numbers(dtype)

    def body(x: Expr) -> Expr:
        size = tirx.Select(x < number(0.0), number(0.0) - x, x)
        t = number(1.0) / (number(1.0) + number(_ERF_P) * size)
        result = _named(t, lambda t: number(1.0) - t * _polynomial(t, _ERF) * tirx.exp(number(0.0) - size * size))
        return _named(result, lambda r: tirx.Select(x < number(0.0), number(0.0) - r, r))

    return _named(call.args[0], body)


def _log1p(call: Expr) -> Expr:
    """log(1 + x) x / ((1 + x) - 1), and x where 1 + x == 1 (Goldberg, What every computer scientist should know, 4)."""
    dtype = _dtype(call)
    one = tirx.const(1.0, dtype)

    def body(x: Expr, more: Expr) -> Expr:
        return tirx.Select(more == one, x, tirx.log(more) * x / tirx.Select(more == one, one, _exact(more - one)))

    return _named(call.args[0], lambda x: _named(_exact(one + x), lambda more: body(x, more)))


def _pow(call: Expr) -> Expr:
    """x**y: small integer exponents become products; negative x needs an integer y, else NaN; x**0 is 1."""
    base, exponent = call.args
    dtype = _dtype(call)
    number = _numbers(dtype)
    known = float(exponent.value) if type(exponent).__name__ == "FloatImm" else None
    if known is not None and known.is_integer() and abs(known) <= _POWERS:
        product = _named(base, lambda x: _product(x, abs(int(known)), dtype))
        return product if known >= 0 else number(1.0) / product

    def body(x: Expr, y: Expr) -> Expr:
        size = _extern("pow", call, _extern("fabs", call, x), y)
        half = y * number(0.5)
        odd = tirx.floor(half) != half
        signed = tirx.Select(odd, number(0.0) - size, size)
        negative = tirx.Select(tirx.floor(y) == y, signed, _extern("sqrt", call, number(-1.0)))
        return tirx.Select(y == number(0.0), number(1.0), tirx.Select(x < number(0.0), negative, size))

    return _named(base, lambda x: _named(exponent, lambda y: body(x, y)))


def _product(x: Expr, power: int, dtype: str) -> Expr:
    if power == 0:
        return tirx.const(1.0, dtype)
    if power == 1:
        return x
    half = _product(x, power // 2, dtype)
    square = _named(half, lambda h: h * h)
    return square * x if power % 2 else square
