"""Expressions by dtype, each with what numpy says: one list for the validator and for the numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import tirx

from tests.spirv.harness import Array

SIZE = 256
INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
FLOATS = ("float16", "float32", "float64")


@dataclass(frozen=True)
class Case:
    """`function` of TVM's expressions and `reference` of numpy's arrays. tolerance: of max(1, |reference|), 0: exact."""

    name: str
    inputs: tuple[str, ...]
    function: Callable[..., Any]
    reference: Callable[..., Array]
    tolerance: float = 0.0
    low: float = -4.0
    high: float = 4.0

    def arrays(self) -> list[Array]:
        """Inputs from a fixed seed: floats in [low, high], integers in half of their range, divisors not zero."""
        rng = np.random.default_rng(sum(map(ord, self.name)))
        return [self._array(rng, dtype) for dtype in self.inputs]

    def _array(self, rng: np.random.Generator, dtype: str) -> Array:
        if dtype == "bool":
            return rng.integers(0, 2, SIZE).astype(bool)
        if dtype.startswith("float"):
            return rng.uniform(self.low, self.high, SIZE).astype(dtype)
        info = np.iinfo(dtype)
        found = rng.integers(info.min // 2 + 1, info.max // 2, SIZE, dtype=dtype)
        return np.where(found == 0, np.array(3, dtype), found)


def _of_dtype(dtype: str) -> list[Case]:
    three = np.array(3, dtype)
    const = tirx.const(3, dtype)
    both = (dtype, dtype)
    found = [
        Case(f"add {dtype}", both, lambda a, b: a + b * const, lambda a, b: (a + b * three).astype(dtype)),
        Case(f"min {dtype}", both, tirx.min, np.minimum),
        Case(f"max {dtype}", both, tirx.max, np.maximum),
        Case(
            f"select {dtype}", both, lambda a, b: tirx.Select(a < b, a, const), lambda a, b: np.where(a < b, a, three)
        ),
        Case(f"not equal {dtype}", both, lambda a, b: a != b, lambda a, b: a != b),
        Case(f"{dtype} to float32", (dtype,), lambda a: a.astype("float32"), lambda a: a.astype("float32")),
        Case(f"{dtype} to int64", (dtype,), lambda a: a.astype("int64"), lambda a: a.astype("int64")),
        Case(f"{dtype} to bool", (dtype,), lambda a: a.astype("bool"), lambda a: a != 0),
    ]
    if dtype in INTEGERS:
        found += [
            Case(f"divide {dtype}", both, lambda a, b: a // b, lambda a, b: a // b),
            Case(f"modulo {dtype}", both, lambda a, b: a % b, lambda a, b: a % b),
            Case(
                f"divide by 7 {dtype}", (dtype,), lambda a: a // tirx.const(7, dtype), lambda a: a // np.array(7, dtype)
            ),
            Case(f"shift {dtype}", (dtype,), lambda a: a >> const, lambda a: a >> three),
            Case(f"{dtype} to int8", (dtype,), lambda a: a.astype("int8"), lambda a: a.astype("int8")),
            Case(f"float32 to {dtype}", ("float32",), lambda a: a.astype(dtype), lambda a: a.astype(dtype), low=0.0),
        ]
    return found


def _function(name: str, reference: Callable[[Array], Array], low: float, high: float, tolerance: float) -> Case:
    return Case(
        name, ("float32",), getattr(tirx, name), lambda a: reference(a.astype(np.float64)), tolerance, low, high
    )


_FUNCTIONS = [
    _function("exp", np.exp, -20, 20, 2e-6),
    _function("exp2", np.exp2, -20, 20, 2e-6),
    _function("exp10", lambda x: 10.0**x, -5, 5, 4e-6),
    _function("log", np.log, 1e-3, 100, 1e-6),
    _function("log2", np.log2, 1e-3, 100, 1e-6),
    _function("log10", np.log10, 1e-3, 100, 1e-6),
    _function("log1p", np.log1p, -0.5, 3, 1e-6),
    _function("sqrt", np.sqrt, 0, 100, 3e-7),
    _function("rsqrt", lambda x: 1 / np.sqrt(x), 1e-2, 100, 1e-6),
    _function("tanh", np.tanh, -100, 100, 4e-7),
    _function("sin", np.sin, -2e5, 2e5, 2e-7),
    _function("cos", np.cos, -2e5, 2e5, 2e-7),
    _function("tan", np.tan, -1, 1, 1e-6),
    _function("erf", np.vectorize(math.erf), -5, 5, 5e-7),
    _function("sigmoid", lambda x: 1 / (1 + np.exp(-x)), -20, 20, 1e-6),
    _function("floor", np.floor, -9, 9, 0),
    _function("ceil", np.ceil, -9, 9, 0),
    _function("trunc", np.trunc, -9, 9, 0),
    _function("round", np.round, -9, 9, 0),
    _function("abs", np.abs, -9, 9, 0),
    _function("asin", np.arcsin, -1, 1, 1e-5),
    _function("acos", np.arccos, -1, 1, 1e-5),
    _function("atan", np.arctan, -9, 9, 1e-5),
]


def _nan_in(a: Array) -> Array:
    return np.where(np.arange(SIZE) % 5 == 0, np.float32(np.nan), a).astype(np.float32)


def _with_nan(a: Any) -> Any:
    return tirx.Select(a > tirx.const(3.0, "float32"), tirx.const(math.nan, "float32"), a)


def _nan_above_three(a: Array) -> Array:
    return np.where(a > 3, np.float32(np.nan), a)


_SPECIAL = [
    Case("not bool", ("bool",), tirx.Not, np.logical_not),
    Case("and bool", ("bool", "bool"), tirx.And, np.logical_and),
    Case("popcount", ("uint32",), tirx.popcount, lambda a: np.array([int(x).bit_count() for x in a], np.uint32)),
    Case("isnan", ("float32",), lambda a: tirx.isnan(_with_nan(a)), lambda a: np.isnan(_nan_above_three(a))),
    Case("max of a number and NaN", ("float32", "float32"), lambda a, b: tirx.max(b, _with_nan(a)),
         lambda a, b: np.fmax(b, _nan_above_three(a))),
    Case("min of NaN and a number", ("float32", "float32"), lambda a, b: tirx.min(_with_nan(a), b),
         lambda a, b: np.fmin(b, _nan_above_three(a))),
    Case("cube", ("float32",), lambda a: tirx.power(a, tirx.const(3.0, "float32")), lambda a: a.astype(float) ** 3, 1e-6),
    Case("power of negative numbers", ("float32", "float32"), lambda a, b: tirx.power(a, tirx.floor(b)),
         lambda a, b: a.astype(float) ** np.floor(b), 2e-5, low=-3.0, high=3.0),
    Case("bits of a float", ("float32",), lambda a: tirx.reinterpret("uint32", a), lambda a: a.view(np.uint32)),
    Case("float of bits", ("uint16",), lambda a: tirx.reinterpret("float16", a >> tirx.const(2, "uint16")),
         lambda a: (a >> np.uint16(2)).view(np.float16)),
    Case("if_then_else", ("float32", "int32"),
         lambda a, b: tirx.if_then_else(b > 0, tirx.exp(a) + tirx.exp(a * a), tirx.log(tirx.abs(a) + tirx.const(1.0, "float32"))),
         lambda a, b: np.where(b > 0, np.exp(a.astype(float)) + np.exp(a.astype(float) ** 2), np.log(np.abs(a.astype(float)) + 1)),
         4e-6),
    Case("product in 64 bits", ("int32", "int32"), lambda a, b: a.astype("int64") * b.astype("int64"),
         lambda a, b: a.astype(np.int64) * b.astype(np.int64)),
    Case("large number", ("int64",), lambda a: a + tirx.const(1 << 40, "int64"), lambda a: a + (1 << 40)),
]  # fmt: skip
CASES = [case for dtype in (*INTEGERS, *FLOATS) for case in _of_dtype(dtype)] + _FUNCTIONS + _SPECIAL
