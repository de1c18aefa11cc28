"""Activations and softplus as expressions: definitions and kernels of every target use the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Expr

Activation = Callable[["tirx.PrimExpr"], "tirx.PrimExpr"]


def _like(x: tirx.PrimExpr, value: float) -> tirx.PrimExpr:
    base, _, lanes = str(x.ty.dtype).partition("x")
    return tirx.Broadcast(tirx.const(value, base), int(lanes)) if lanes else tirx.const(value, base)


def _times_sigmoid(x: tirx.PrimExpr, y: tirx.PrimExpr) -> tirx.PrimExpr:
    """x * sigmoid(y); where exp overflows the quotient is 0, as it should be."""
    return x / (_like(x, 1.0) + tirx.exp(_like(x, 0.0) - y))


def silu(x: tirx.PrimExpr) -> tirx.PrimExpr:
    """x * sigmoid(x) (Hendrycks & Gimpel 2016), x float, a scalar or a vector."""
    return _times_sigmoid(x, x)


def gelu_tanh(x: tirx.PrimExpr) -> tirx.PrimExpr:
    """x / 2 * (1 + tanh(z)) with z = sqrt(2 / pi) (x + 0.044715 x^3) (ibid.), since 1 + tanh(z) = 2 sigmoid(2 z)."""
    twice = _like(x, 2 * math.sqrt(2 / math.pi))
    return _times_sigmoid(x, x * (twice + twice * _like(x, 0.044715) * x * x))


ACTIVATIONS: Mapping[str, Activation] = {"silu": silu, "gelu_tanh": gelu_tanh}


def softplus(x: Expr, constant: Callable[[float], Expr], value: Callable[[Expr], Expr]) -> Expr:
    """log(1 + e**x) of float32, a scalar or a vector as `constant` makes; relative error 1e-6; NaN stays NaN.

    max(x, 0) + log(1 + e), e = e**-|x|, and log(1 + e) = 2 artanh(z) with z = e / (2 + e) <= 1/3, by its series.
    """
    zero = constant(0.0)
    e = value(I.exp(I.min(x, zero - x)))
    z = value(e / (constant(2.0) + e))
    square = value(z * z)
    series = constant(1 / 15)
    for n in (13, 11, 9, 7, 5, 3, 1):
        series = series * square + constant(1 / n)
    return I.max(zero, x) + constant(2.0) * z * series
