"""The router of mixtures against numpy: softmax over all experts, the best first, of equals the lower id."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm

import tir_schedules.cpu  # noqa: F401 - the compiled exp is the one that it installs
from mlcpipe.nn.moe import moe_route

ROWS = 37


def run(logits: np.ndarray, chosen: int, normalize: bool) -> tuple[np.ndarray, np.ndarray]:
    """The compiled function: logits f32[m, experts] -> weights f32[m, chosen], ids i32[m, chosen]."""
    rows, experts = logits.shape
    func = moe_route(experts, chosen, normalize).with_attr("global_symbol", "main")
    built: Any = tvm.compile(tvm.IRModule({"main": func}), target="llvm")
    weights = tvm.runtime.tensor(np.full((rows, chosen), np.nan, np.float32))
    ids = tvm.runtime.tensor(np.full((rows, chosen), -1, np.int32))
    built["main"](tvm.runtime.tensor(logits), weights, ids)
    return weights.numpy(), ids.numpy()


def expected(logits: np.ndarray, chosen: int, normalize: bool) -> tuple[np.ndarray, np.ndarray]:
    ids = np.argsort(-logits, axis=1, kind="stable")[:, :chosen]
    all_weights = np.exp(logits.astype(np.float64) - logits.max(1, keepdims=True))
    all_weights /= all_weights.sum(1, keepdims=True)
    weights = np.take_along_axis(all_weights, ids, 1)
    return weights / weights.sum(1, keepdims=True) if normalize else weights, ids


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("experts", "chosen"), [(1, 1), (4, 4), (8, 2), (128, 8)])
def test_routes_as_numpy(experts: int, chosen: int, normalize: bool) -> None:
    # One decimal: many equal logits.
    logits = np.random.default_rng(3).normal(0, 2, (ROWS, experts)).round(1).astype(np.float32)
    weights, ids = run(logits, chosen, normalize)
    want_weights, want_ids = expected(logits, chosen, normalize)
    np.testing.assert_array_equal(ids, want_ids)
    np.testing.assert_allclose(weights, want_weights, rtol=0, atol=3e-7)


def test_large_logits_do_not_overflow() -> None:
    logits = np.array([[1e4, 1e4 + 1, -1e4, 0.0]], np.float32)
    weights, ids = run(logits, 2, False)
    assert ids.tolist() == [[1, 0]]
    np.testing.assert_allclose(weights[0], [1 / (1 + np.exp(-1)), 1 / (1 + np.exp(1))], rtol=1e-5)


def test_logits_that_are_not_numbers_choose_experts_that_exist() -> None:
    logits = np.full((2, 8), np.nan, np.float32)
    weights, ids = run(logits, 3, True)
    assert ((ids >= 0) & (ids < 8)).all()
    assert np.isnan(weights).all()


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf])
def test_one_logit_that_is_not_a_number_shows(value: float, normalize: bool) -> None:
    """As softmax of torch: one NaN or infinity makes all weights of a token NaN, and of no other token."""
    logits = np.tile(np.arange(8, dtype=np.float32), (9, 1))
    logits[np.arange(8), np.arange(8)] = value
    weights, ids = run(logits, 2, normalize)
    assert ((ids >= 0) & (ids < 8)).all()
    assert np.isnan(weights[:8]).all() and np.isfinite(weights[8]).all()
