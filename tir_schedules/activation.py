"""Activations of gated feed-forward blocks as expressions: definitions and kernels of every target use the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from tvm import tirx

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
