"""Removes heads or columns of a matrix's input; the others compensate for them by least squares.

The output of y = x w^T without the columns P of x has the mean squared error tr(W_P [(H^-1)_PP]^-1 W_P^T) when the
other columns of w are those of least error, where H is the mean of x^T x (Hassibi & Stork 1993, Optimal Brain Surgeon;
for whole columns Kurtic et al. 2023, ZipLM). The unit of least error is removed first, then that of the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlcpipe.compiler.calibration.changed import Changed
from mlcpipe.pruning.work import Array, PrunedTensor, Work
from mlcpipe.quantization.inputs import Inputs

# Of each column's mean square, added to it, times (columns / rows)^2, against overfitting to few rows.
_DAMPING = 0.01
_LEAST = 1e-8  # of the mean, the same for columns that are always 0
_CANDIDATES = 128  # units ranked against each other at a time
_REMOVED = 32  # of those


@dataclass(frozen=True)
class Units:
    """Parts of a layer to remove together: `size` columns of `consumer`, and as many rows of each of `producers`.

    There are `count`; names follow the layer's prefix. A producer has one dimension or two.
    """

    count: int
    size: int
    consumer: str
    producers: Mapping[str, int]


def remove_units(work: Work, units: Units) -> Iterator[PrunedTensor]:
    """The tensors of a checkpoint whose layers each keep their own `work.keep` units."""

    def change(prefix: str, changed: Changed, inputs: Mapping[str, Inputs]) -> dict[str, Any]:
        consumer = prefix + units.consumer
        gram = inputs[consumer].gram
        assert gram is not None
        seen = sum(map(len, work.stream.hidden))
        damping = _DAMPING * min(1.0, len(gram) / seen) ** 2
        kept, w = without_units(changed.read(consumer), gram, units.size, units.count - work.keep, damping)
        changed.put(consumer, w)
        cuts: dict[str, Any] = {consumer: np.s_[:, rows_of(kept, units.size)]}
        for name, rows in units.producers.items():
            if prefix + name in changed.tensors:
                cuts[prefix + name] = rows_of(kept, rows)
        return cuts

    return work.changed_layers(change)


def rows_of(units: Array, size: int) -> Array:
    """int[units] -> int[units * size], the rows of each."""
    found: Array = (units[:, None] * size + np.arange(size)).ravel()
    return found


def without_units(w: Array, gram: Array, size: int, remove: int, damping: float) -> tuple[Array, Array]:
    """w float32[N, K] in units of `size` columns, gram float32[K, K] -> the remaining units, sorted, and the updated w.

    Its `remove` removed units have columns of 0. `damping` times its diagonal is added to the gram. Uses float64.
    """
    h = gram.astype(np.float64)
    diagonal = np.diag(h).copy()
    h[np.diag_indices_from(h)] += damping * diagonal + _LEAST * diagonal.mean() + np.finfo(np.float64).tiny
    inverse, changed = np.linalg.inv(h), w.astype(np.float64)
    left = np.arange(w.shape[1] // size)
    while remove:
        gone = _best(changed, inverse, left, size)[:remove]
        columns = rows_of(gone, size)
        share = np.linalg.solve(inverse[np.ix_(columns, columns)], inverse[columns])
        changed -= changed[:, columns] @ share
        inverse -= inverse[:, columns] @ share
        changed[:, columns] = 0
        left = np.setdiff1d(left, gone)
        remove -= len(gone)
    return left, changed.astype(np.float32)


def _best(w: Array, inverse: Array, left: Array, size: int) -> Array:
    """The units to remove next: the one of least error, or several single columns, each the least after the others."""
    if size > 1:
        errors = [_error(w[:, columns], inverse[np.ix_(columns, columns)]) for columns in _columns(left, size)]
        return left[[int(np.argmin(errors))]]
    errors = (w[:, left] ** 2).sum(axis=0) / np.diag(inverse)[left]
    near = left[np.argsort(errors, kind="stable")[:_CANDIDATES]]
    # The effect of one removal on other candidates follows from their part of H^-1 and W^T W.
    part, products = inverse[np.ix_(near, near)].copy(), w[:, near].T @ w[:, near]
    gone: list[int] = []
    for _ in range(min(_REMOVED, len(near))):
        each = np.diag(products) / np.maximum(np.diag(part), np.finfo(np.float64).tiny)
        each[gone] = np.inf
        j = int(np.argmin(each))
        share = part[j] / part[j, j]
        row = products[j]
        products = products - np.outer(share, row) - np.outer(row, share) + row[j] * np.outer(share, share)
        part = part - np.outer(part[:, j], share)
        gone.append(j)
    return near[gone]


def _columns(units: Array, size: int) -> Array:
    return rows_of(units, size).reshape(len(units), size)


def _error(w: Array, inverse: Array) -> float:
    """tr(w inverse^-1 w^T)."""
    return float(np.einsum("kn,kn->", np.linalg.solve(inverse, w.T), w.T))
