"""The polynomials exp and erf, in scalars and vectors, over all of float32."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest
from tvm import te, tirx

from tests.kernels.harness import Array, compile_together, tensors, unwritten

LOW, HIGH = -87.0, 88.0
COUNT = 1 << 18
FUNCTIONS = {"exp": tirx.exp, "erf": tirx.erf, "sigmoid": tirx.sigmoid, "tanh": tirx.tanh}


def make(name: str, count: int, dtype: str, lanes: int) -> tirx.PrimFunc:
    from tvm import s_tir

    x = te.placeholder((count,), dtype, name="x")
    y = te.compute((count,), lambda i: FUNCTIONS[name](x[i]), name="y")
    sch = s_tir.Schedule(te.create_prim_func([x, y]).with_attr("global_symbol", "main"))
    if lanes > 1:
        (loop,) = sch.get_loops(sch.get_sblock("y"))
        _, inner = sch.split(loop, [None, lanes])
        sch.vectorize(inner)
    return sch.mod["main"].with_attr("tirx.is_scheduled", True)


@cache
def functions() -> Mapping[str, Any]:
    kinds = [("exp", "float32", lanes) for lanes in (1, 2, 4, 8, 16)]
    kinds += [("exp", "float16", 1), ("exp", "float16", 16), ("exp", "float64", 1)]
    kinds += [(name, "float32", lanes) for name in ("erf", "sigmoid", "tanh") for lanes in (1, 16)]
    return compile_together({f"{n}_{d}_{lanes}": make(n, COUNT, d, lanes) for n, d, lanes in kinds})


def run(name: str, x: Array) -> Array:
    """Results, float64, of a compiled function on x, which is padded with zeros."""
    padded = np.zeros(COUNT, x.dtype)
    padded[: len(x)] = x
    out = tensors([padded, unwritten((COUNT,), str(x.dtype))])
    functions()[name](*out)
    result: Array = out[1].numpy()[: len(x)].astype(np.float64)
    return result


def whole_range() -> Array:
    """Every 2**14th float32 bit pattern that is a number: both signs, denormals, infinities and the largest."""
    bits = np.arange(0, 1 << 32, 1 << 14, dtype=np.uint64).astype(np.uint32)
    special = np.array([0.0, -0.0, np.inf, -np.inf, 3.4e38, -3.4e38, 1e-45, -1e-45, LOW, HIGH, 0.5, -0.5], np.float32)
    x = np.concatenate([bits.view(np.float32), special])
    return x[~np.isnan(x)][:COUNT]


@pytest.mark.parametrize("lanes", [1, 2, 4, 8, 16])
def test_exp_over_the_whole_range(lanes: int) -> None:
    x = whole_range()
    assert len(x) > 250_000
    expected = np.exp(np.clip(x.astype(np.float64), LOW, HIGH))
    error = np.abs(run(f"exp_float32_{lanes}", x) / expected - 1)
    bound = 3e-7 + 7.4e-8 * np.abs(np.clip(x, LOW, HIGH))  # as the docstring says
    assert (error <= bound).all(), x[(error / bound).argmax()]


@pytest.mark.parametrize("kind", ["exp_float32", "exp_float16", "erf_float32", "sigmoid_float32", "tanh_float32"])
@pytest.mark.parametrize("lanes", [1, 16])
def test_what_is_no_number_stays_none(kind: str, lanes: int) -> None:
    """NaN of both signs, quiet and signalling; its neighbours in the vector are what they were."""
    dtype = kind.split("_")[1]
    patterns = {
        "float32": np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF], np.uint32),
        "float16": np.array([0x7E00, 0xFE00, 0x7C01, 0xFFFF], np.uint16),
    }
    x = np.linspace(-3, 3, 64).astype(dtype)
    expected = run(f"{kind}_{lanes}", x)
    odd = x.copy()
    odd[5:64:9] = np.resize(patterns[dtype].view(dtype), 7)
    found = run(f"{kind}_{lanes}", odd)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(odd))
    np.testing.assert_array_equal(found[~np.isnan(odd)], expected[~np.isnan(odd)])


@pytest.mark.parametrize("lanes", [1, 16])
def test_exp_near_zero(lanes: int) -> None:
    """Dense in [-2, 2], where rounding x * log2(e) does not count yet."""
    x = np.linspace(-2, 2, COUNT).astype(np.float32)
    error = np.abs(run(f"exp_float32_{lanes}", x) / np.exp(x.astype(np.float64)) - 1)
    assert error.max() <= 4e-7


@pytest.mark.parametrize("lanes", [1, 16])
def test_exp_of_half_precision(lanes: int) -> None:
    x = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).view(np.float16)
    x = x[~np.isnan(x)]
    with np.errstate(over="ignore"):
        expected = np.exp(np.clip(x.astype(np.float64), LOW, HIGH)).astype(np.float16).astype(np.float64)
    found = run(f"exp_float16_{lanes}", x)
    # One unit in the last place of a float16 at most; infinite where float16 ends.
    np.testing.assert_array_equal(np.isinf(found), np.isinf(expected))
    finite = np.isfinite(expected)
    assert (np.abs(found[finite] - expected[finite]) <= np.maximum(expected[finite] * 2.0**-10, 2.0**-24)).all()


def test_exp_of_double_precision_is_libm() -> None:
    x = np.linspace(-700, 700, 1001)
    np.testing.assert_allclose(run("exp_float64_1", x), np.exp(x), rtol=1e-15)


@pytest.mark.parametrize("lanes", [1, 16])
def test_sigmoid_and_tanh(lanes: int) -> None:
    x = whole_range()
    wide = x.astype(np.float64)
    with np.errstate(over="ignore"):
        sigmoid = 1 / (1 + np.exp(-wide))
    assert np.abs(run(f"sigmoid_float32_{lanes}", x) - sigmoid).max() <= 4e-7
    assert np.abs(run(f"tanh_float32_{lanes}", x) - np.tanh(wide)).max() <= 4e-7


@pytest.mark.parametrize("lanes", [1, 16])
def test_erf_over_the_whole_range_and_near_zero(lanes: int) -> None:
    for x in (whole_range(), np.linspace(-4, 4, 20_001).astype(np.float32)):
        expected = np.array([math.erf(value) for value in x.tolist()])
        assert np.abs(run(f"erf_float32_{lanes}", x) - expected).max() <= 6e-7
