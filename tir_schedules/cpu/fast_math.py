"""exp and erf as polynomials that vectorize: without them LLVM calls libm once an element.

TVM lowers intrinsics through a rule per operator and target kind; `install` sets those of `exp` and `erf` for `llvm`.
sigmoid and tanh need none: TVM writes them with exp.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tvm import tirx

# 2**f on [-0.5, 0.5]: Taylor to degree 6, relative error 2e-7.
_COEFFICIENTS = (
    0.00015403530393381608,
    0.0013333558146428443,
    0.009618129107628477,
    0.05550410866482158,
    0.24022650695910072,
    0.6931471805599453,
    1.0,
)
# Abramowitz & Stegun 7.1.26: erf(x) = 1 - t (a1 + t (a2 + ...)) e**-x^2 with t = 1 / (1 + p x), for x >= 0.
_ERF_P = 0.3275911
_ERF_COEFFICIENTS = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
_LEVEL = 100  # above TVM's own rules (99)


def install() -> None:
    """Use `exp` and `erf` below in everything compiled for CPUs by this process."""
    tirx.register_intrin_lowering("tirx.exp", target="llvm", f=_rule("exp", exp), level=_LEVEL)
    tirx.register_intrin_lowering("tirx.erf", target="llvm", f=_rule("erf", erf), level=_LEVEL)


def _rule(name: str, function: Callable[[tirx.PrimExpr], tirx.PrimExpr]) -> Callable[[tirx.Call], tirx.PrimExpr]:
    def lower(call: tirx.Call) -> tirx.PrimExpr:
        x = call.args[0]
        dtype = str(x.ty.dtype)
        if dtype.startswith("float32"):
            return function(x)
        if dtype == "float64":
            return tirx.call_pure_extern("float64", name, x)
        return function(x.astype(dtype.replace(dtype.split("x")[0], "float32"))).astype(dtype)

    return lower


def erf(x: tirx.PrimExpr) -> tirx.PrimExpr:
    """The error function of float32 x, a scalar or a vector; NaN stays NaN. Absolute error at most 6e-7."""
    one = _like(x, 1.0)

    def of_size(a: tirx.PrimExpr) -> tirx.PrimExpr:
        def of_quotient(t: tirx.PrimExpr) -> tirx.PrimExpr:
            poly = _like(t, _ERF_COEFFICIENTS[0])
            for c in _ERF_COEFFICIENTS[1:]:
                poly = poly * t + _like(t, c)
            return one - poly * t * exp(_like(x, 0.0) - a * a)

        return _let(one / (one + _like(x, _ERF_P) * a), of_quotient)

    size = tirx.max(x, _like(x, 0.0) - x)
    return _let(_let(size, of_size), lambda y: tirx.Select(x < _like(x, 0.0), _like(x, 0.0) - y, y))


def exp(x: tirx.PrimExpr) -> tirx.PrimExpr:
    """e**x for float32 x, a scalar or a vector; x is clipped to [-87, 88], and NaN stays NaN.

    Relative error at most 3e-7 + 7.4e-8 |x|: the polynomial's, and that of log2(e) and x log2(e) as float32.
    """

    def reduced(y: tirx.PrimExpr) -> tirx.PrimExpr:
        return _let(tirx.nearbyint(y), lambda r: _let(y - r, lambda f: _power(r, f)))

    # min(a, b) is `a < b ? a : b`: with x as b, NaN passes. The other way round it would become a bound.
    clipped = tirx.max(_like(x, -87.0), tirx.min(_like(x, 88.0), x))
    return _let(clipped * _like(x, math.log2(math.e)), reduced)


def _power(r: tirx.PrimExpr, f: tirx.PrimExpr) -> tirx.PrimExpr:
    """2**(r + f) for whole r in [-126, 127] and |f| <= 0.5; NaN if f is NaN, whatever r is."""
    dtype = str(r.ty.dtype)
    poly = _like(f, _COEFFICIENTS[0])
    for c in _COEFFICIENTS[1:]:
        poly = poly * f + _like(f, c)
    # The last bits of r + 1.5 * 2**23 are those of r as an integer. A cast says nothing of NaN (LLVM: poison).
    whole = tirx.reinterpret(dtype.replace("float32", "int32"), r + _like(r, 1.5 * 2**23))
    return poly * tirx.reinterpret(dtype, tirx.shift_left(whole + _like(whole, 127), _like(whole, 23)))


def _like(x: tirx.PrimExpr, value: float) -> tirx.PrimExpr:
    """A constant of the type of x, all lanes alike."""
    base, _, lanes = str(x.ty.dtype).partition("x")
    const = tirx.const(value, base)
    return tirx.Broadcast(const, int(lanes)) if lanes else const


def _let(value: tirx.PrimExpr, body: Callable[[tirx.PrimExpr], tirx.PrimExpr]) -> tirx.PrimExpr:
    """let v = value in body(v), so that the value is computed once."""
    var = tirx.Var("v", str(value.ty.dtype))
    return tirx.Let(var, value, body(var))
