"""The search for scales: beside a slow one in numpy, beside the arithmetic of MLC-LLM, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest

from mlcpipe.errors import CheckpointError, UsageError
from mlcpipe.quantization import load_scheme, search
from mlcpipe.quantization.inputs import Inputs
from mlcpipe.quantization.packing import method_of, pack, unpack
from mlcpipe.quantization.scheme import Scheme
from mlcpipe.support.defaults import RTN, SEARCH
from tests.unit.quantization.reference import KINDS, Array, make_weight

SEARCHED = ("q3f16_1", "q4f16_1", "q4f32_1")


def squared_error(scheme: Scheme, packed: dict[str, Array], w: Array) -> Array:
    """Of each row, float64[N]."""
    return ((unpack(scheme, packed, w.shape[1]).astype(np.float64) - w) ** 2).sum(axis=1)


def best_error(scheme: Scheme, w: Array, weights: Array | float = 1.0) -> float:
    """The least squared error of a group w[K] among the scales that the kernel tries, fitted to their levels."""
    low, high = -scheme.zero_point, (1 << scheme.bits) - 1 - scheme.zero_point
    peak, errors = w[np.abs(w).argmax()], []
    for step in range(-9, 10):
        levels = np.clip(np.rint(w * (1 + 0.025 * step) * high / peak), low, high)
        scale = (weights * w * levels).sum() / (weights * levels * levels).sum()
        errors.append((weights * (w - scale * levels) ** 2).sum())
    return float(min(errors))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SEARCHED)
def test_the_error_is_not_above_that_of_rtn(name: str, kind: str) -> None:
    scheme = load_scheme(name)
    for n, k in ((33, 100), (5, 64), (1, 1)):
        w = make_weight(kind, (n, k), seed=k)
        searched, plain = (squared_error(scheme, pack(scheme, w, method=m), w) for m in (SEARCH, RTN))
        # A scale is rounded to float16, which moves the largest number of a group by 2^-11 of it at most.
        assert searched.sum() <= plain.sum() * 1.005 + 2.0**-22 * (w.astype(np.float64) ** 2).sum() + 1e-30
        if kind == "normal" and k > 32:
            assert searched.sum() < 0.75 * plain.sum()


@pytest.mark.parametrize("name", SEARCHED)
def test_the_error_is_that_of_a_slow_search(name: str) -> None:
    scheme = load_scheme(name)
    w = make_weight("normal", (200, scheme.group_size))
    expected = np.array([best_error(scheme, row.astype(np.float64)) for row in w])
    found = squared_error(scheme, pack(scheme, w, method=SEARCH), w)
    assert (found <= 1.002 * expected).all()
    assert found.sum() > 0.99 * expected.sum()  # less where codes are rounded once more, to the fitted scale


@pytest.mark.parametrize("name", SEARCHED)
def test_importance_weights_the_error_of_columns(name: str) -> None:
    """Beside the slow search, weighted, and without effect where all columns count alike."""
    scheme, rng = load_scheme(name), np.random.default_rng(5)
    w = make_weight("normal", (200, scheme.group_size))
    weights = rng.uniform(0.01, 4, size=scheme.group_size).astype(np.float32)
    inputs = Inputs(weights, np.sqrt(weights))
    packed = pack(scheme, w, method=SEARCH, inputs=inputs)
    found = (weights * (unpack(scheme, packed, w.shape[1]).astype(np.float64) - w) ** 2).sum(axis=1)
    expected = np.array([best_error(scheme, row.astype(np.float64), weights) for row in w])
    assert (found <= 1.002 * expected).all()
    plain = pack(scheme, w, method=SEARCH)
    unweighted = (weights * (unpack(scheme, plain, w.shape[1]).astype(np.float64) - w) ** 2).sum(axis=1)
    assert found.sum() < 0.98 * unweighted.sum()
    alike = pack(scheme, w, method=SEARCH, inputs=Inputs(np.full_like(weights, 3), weights))
    assert all((alike[key] == plain[key]).all() for key in plain)


def test_each_group_has_the_importance_of_its_columns() -> None:
    """Columns of another group that count more change nothing."""
    scheme, w = load_scheme("q4f16_1"), make_weight("normal", (21, 100))
    few, many = np.ones(100, np.float32), np.ones(100, np.float32)
    many[32:64] = np.arange(1, 33)
    one, other = (pack(scheme, w, method=SEARCH, inputs=Inputs(values, values)) for values in (few, many))
    same = [bool((one["q_scale"][:, g] == other["q_scale"][:, g]).all()) for g in range(4)]
    assert same == [True, False, True, True]


def test_all_codes_and_signs_occur_and_padding_is_0() -> None:
    scheme = load_scheme("q4f16_1")
    packed = pack(scheme, make_weight("normal", (40, 100)), method=SEARCH)
    codes = (packed["q_weight"][:, :, None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15).reshape(40, 128)
    assert set(codes[:, :100].ravel()) == set(range(16))
    assert (codes[:, 100:] == 0).all()
    assert (packed["q_scale"] < 0).any() and (packed["q_scale"] > 0).any()


def test_many_chunks_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    scheme, w = load_scheme("q4f16_1"), make_weight("normal", (37, 100))
    whole = pack(scheme, w, method=SEARCH)
    monkeypatch.setattr(search, "CHUNK", 500)
    for key, array in pack(scheme, w, method=SEARCH).items():
        np.testing.assert_array_equal(array, whole[key])


@pytest.mark.parametrize("bad", (np.nan, np.inf, -np.inf, 65520.0))
def test_what_is_not_finite_or_too_large_is_refused(bad: float) -> None:
    w = make_weight("normal", (3, 64))
    w[2, 33] = bad
    with pytest.raises(CheckpointError, match=r"layers\.0\.up"):
        pack(load_scheme("q4f16_1"), w, name="layers.0.up", method=SEARCH)


def test_the_method_is_search_where_it_applies() -> None:
    assert method_of(load_scheme("q4f16_1"), None) == SEARCH
    assert method_of(load_scheme("q4f16_1"), RTN) == RTN
    assert method_of(load_scheme("q8f16_1"), None) == RTN
    for name, method in (("q8f16_1", SEARCH), ("q0f16", RTN), ("keep", SEARCH)):
        with pytest.raises(UsageError, match=f"--method {method} has no effect on {name}"):
            method_of(load_scheme(name), method)
    with pytest.raises(UsageError, match="unknown method"):
        method_of(load_scheme("q4f16_1"), "hqq")
