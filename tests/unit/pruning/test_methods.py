"""The arithmetic of pruning, beside the definitions of the papers and least squares of numpy's."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from mlcpipe.pruning.methods import sparsegpt, wanda
from mlcpipe.pruning.units import without_units
from mlcpipe.quantization.inputs import Inputs

DAMPING = 1e-6
PRUNERS = {"wanda": wanda.prune_matrix, "sparsegpt": sparsegpt.prune_matrix}


def drawn(n: int = 24, k: int = 192, rows: int = 600, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """w float32[n, k], and x float32[rows, k] whose columns depend on each other and differ in size."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, k)) @ (np.eye(k) + 0.3 * rng.normal(size=(k, k)) / np.sqrt(k))
    x *= rng.lognormal(size=k)
    return rng.normal(size=(n, k)).astype(np.float32), x.astype(np.float32)


def inputs_of(x: np.ndarray) -> Inputs:
    return Inputs((x * x).mean(axis=0), np.abs(x).max(axis=0), gram=x.T @ x / len(x))


def wanda_by_the_paper(w: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Of each four, the two of least |W_ij| ||X_j||_2 are 0."""
    found = w.copy()
    for i, first in itertools.product(range(len(w)), range(0, w.shape[1], 4)):
        scores = [abs(w[i, j]) * np.sqrt((x[:, j] ** 2).sum()) for j in range(first, first + 4)]
        for j in sorted(range(4), key=scores.__getitem__)[:2]:
            found[i, first + j] = 0
    return found


def sparsegpt_by_the_paper(w: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Algorithm 1 with blocks of 4, in float64: the upper Cholesky factor of H^-1, and updates of all later columns."""
    h = x.T.astype(np.float64) @ x / len(x)
    h += 0.01 * np.diag(h).mean() * np.eye(len(h))
    factor = np.linalg.cholesky(np.linalg.inv(h)).T
    found = w.astype(np.float64)
    for first in range(0, w.shape[1], 4):
        block = slice(first, first + 4)
        scores = found[:, block] ** 2 / np.diag(factor)[block] ** 2
        zero = np.argsort(scores, axis=1)[:, :2] + first
        for j in range(first, first + 4):
            gone = (zero == j).any(axis=1)
            error = np.where(gone, found[:, j], 0) / factor[j, j]
            found[:, j:] -= np.outer(error, factor[j, j:])
            found[gone, j] = 0
    return found


def test_wanda_is_that_of_the_paper() -> None:
    w, x = drawn()
    np.testing.assert_array_equal(wanda.prune_matrix(w, inputs_of(x)), wanda_by_the_paper(w, x))


def test_sparsegpt_is_that_of_the_paper() -> None:
    w, x = drawn()
    found, expected = sparsegpt.prune_matrix(w, inputs_of(x)), sparsegpt_by_the_paper(w, x)
    np.testing.assert_array_equal(found == 0, expected == 0)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-3 * np.abs(expected).max())


def test_sparsegpt_loses_less_than_wanda_and_wanda_less_than_magnitude() -> None:
    w, x = drawn()
    plain = Inputs(np.ones(w.shape[1], np.float32), np.ones(w.shape[1], np.float32))
    candidates = [prune(w, inputs_of(x)) for prune in PRUNERS.values()] + [wanda.prune_matrix(w, plain)]
    best, good, poor = (float(((x @ (w - q).T) ** 2).mean()) for q in (candidates[1], candidates[0], candidates[2]))
    assert best < 0.9 * good < 0.9 * poor


@pytest.mark.parametrize("method", PRUNERS)
def test_two_of_four_are_zero_also_of_equals_and_of_zeros(method: str) -> None:
    w, x = drawn(8, 64)
    w[:2], w[2, 4:8], x[:, 8:16] = 1.0, 0.0, 0.0
    found = PRUNERS[method](w, inputs_of(x))
    zeros = (found == 0).reshape(8, -1, 4).sum(axis=2)
    assert (zeros >= 2).all() and (np.delete(zeros, 2, axis=0) == 2).all() and np.isfinite(found).all()


def best_left(w: np.ndarray, x: np.ndarray, columns: list[int]) -> tuple[float, np.ndarray]:
    """The mean squared error of x w^T without all but some columns, and their least-squares weights."""
    fitted = np.linalg.lstsq(x[:, columns].astype(np.float64), x @ w.T.astype(np.float64), rcond=None)[0]
    return float(((x[:, columns] @ fitted - x @ w.T) ** 2).sum() / len(x)), fitted.T


@pytest.mark.parametrize("size", [1, 4])
def test_the_unit_that_goes_is_the_best_and_the_others_make_up_for_it(size: int) -> None:
    w, x = drawn(12, 24)
    kept, found = without_units(w, inputs_of(x).gram, size, 1, DAMPING)
    count = w.shape[1] // size
    rests = [[j for j in range(w.shape[1]) if j // size != unit] for unit in range(count)]
    least, fitted = min((best_left(w, x, rest) for rest in rests), key=lambda one: one[0])
    (gone,) = set(range(count)) - set(kept.tolist())
    assert best_left(w, x, rests[gone])[0] == pytest.approx(least)
    assert (found[:, gone * size : (gone + 1) * size] == 0).all()
    np.testing.assert_allclose(found[:, rests[gone]], fitted, rtol=0, atol=2e-3)


def test_many_columns_go_as_one_by_one() -> None:
    """Candidates are ranked by a part of the matrices; each is the best after those before it all the same."""
    w, x = drawn(16, 96)
    gram = inputs_of(x).gram
    left, step = np.arange(96), w
    for _ in range(40):
        kept, step = without_units(step[:, left], gram[np.ix_(left, left)], 1, 1, DAMPING)
        left, step = left[kept], np.pad(step[:, kept], ((0, 0), (0, 0)))
        whole = np.zeros_like(w)
        whole[:, left] = step
        step = whole
    together, _ = without_units(w, gram, 1, 40, DAMPING)
    np.testing.assert_array_equal(together, left)


@pytest.mark.parametrize("size", [1, 8])
def test_what_is_zero_or_double_is_lost_without_a_loss(size: int) -> None:
    w, x = drawn(16, 64)
    units = x.reshape(len(x), -1, size)
    units[:, 3], units[:, 5] = 0, units[:, 1]
    x = units.reshape(len(x), -1)
    kept, found = without_units(w, inputs_of(x).gram, size, 2, DAMPING)
    assert 3 not in kept and len({1, 5} & set(kept.tolist())) == 1
    np.testing.assert_allclose(x @ found.T, x @ w.T, rtol=0, atol=1e-3 * np.abs(x @ w.T).max())
