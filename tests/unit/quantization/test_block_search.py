"""Quantization to block formats with a minimum: beside a slow search in numpy, and for odd inputs."""

from __future__ import annotations

import numpy as np
import pytest

from mlcpipe.errors import CheckpointError
from mlcpipe.quantization import load_scheme
from mlcpipe.quantization.inputs import Inputs
from mlcpipe.quantization.native_formats import SCHEMES
from mlcpipe.quantization.packing import pack, unpack
from mlcpipe.support.defaults import RTN, SEARCH
from tests.unit.quantization.reference import Array, make_weight

Q4_K = SCHEMES["Q4_K"]


def error(w: Array, method: str, name: str = "Q4_K") -> float:
    """Squared error of all of w[N, K]."""
    scheme = SCHEMES[name]
    return float(((unpack(scheme, pack(scheme, w, method=method), w.shape[1]).astype(np.float64) - w) ** 2).sum())


def best_error(x: Array, top: int) -> float:
    """The least squared error of a group x[K] among the lines that the kernel tries."""
    errors = []
    for step in range(-9, 10):
        scale, low = np.ptp(x) / (top + 0.1 * step), x.min()
        for _ in range(2):
            codes = np.clip(np.rint((x - low) / scale), 0, top)
            scale, low = np.polyfit(codes, x, 1)
            errors.append(((x - scale * codes - low) ** 2).sum())
    return float(min(errors))


@pytest.mark.parametrize("name", ["Q4_K", "Q2_K"])
def test_the_error_is_that_of_a_slow_search(name: str) -> None:
    scheme, w = SCHEMES[name], make_weight("normal", (8, 512))
    groups = w.astype(np.float64).reshape(-1, scheme.group_size)
    expected = sum(best_error(x, (1 << scheme.bits) - 1) for x in groups)
    # Scales and minima are in 127 steps of the largest of a block, and codes are rounded to those.
    assert 0.97 * expected < error(w, SEARCH, name) < 1.02 * expected


@pytest.mark.parametrize("name", ["Q4_K", "Q2_K"])
def test_importance_weights_the_error_of_columns(name: str) -> None:
    scheme, w = SCHEMES[name], make_weight("normal", (24, 512))
    weights = np.random.default_rng(3).uniform(0.01, 4, size=512).astype(np.float32)
    several = [None, Inputs(weights, weights), Inputs(np.full_like(weights, 3), weights)]
    packed = [pack(scheme, w, method=SEARCH, inputs=inputs) for inputs in several]
    plain, weighted, alike = ((weights * (unpack(scheme, one, 512) - w) ** 2).sum() for one in packed)
    assert weighted < 0.96 * plain
    assert alike == pytest.approx(plain, rel=1e-3)


def test_the_error_is_below_that_of_16_levels() -> None:
    w = make_weight("normal", (16, 1024))
    levels = load_scheme("q4f16_1")
    found = unpack(levels, pack(levels, w, method=SEARCH), 1024)
    assert error(w, SEARCH) < 0.78 * ((found - w) ** 2).sum()
    assert error(w, SEARCH) < 0.85 * error(w, RTN)


@pytest.mark.parametrize("kind", ["negative", "zeros", "outlier", "limit16"])
def test_odd_inputs_lose_no_more_than_with_the_scales_that_span_them(kind: str) -> None:
    w = make_weight(kind, (5, 512))
    assert error(w, SEARCH) <= 1.01 * error(w, RTN)


def test_equal_numbers_are_exact_but_for_the_float16_minimum() -> None:
    w = np.repeat(np.float32([0, 3, -0.25]), 256).reshape(3, 256)
    np.testing.assert_allclose(unpack(Q4_K, pack(Q4_K, w, method=SEARCH), 256), w, rtol=2**-10)


def test_what_is_not_finite_is_refused() -> None:
    w = make_weight("normal", (3, 256))
    w[1, 7] = np.nan
    with pytest.raises(CheckpointError, match=r"layers\.0\.up"):
        pack(Q4_K, w, name="layers.0.up", method=SEARCH)
