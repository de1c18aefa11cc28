"""SparseGPT (Frantar & Alistarh 2023, arXiv:2301.00774) in 2:4: remaining numbers compensate for those set to 0.

Columns are visited in order, as in `mlcpipe/quantization/gptq.py`: with the upper triangular R of H = R R^T, the mean
of x^T x with 1 % of its diagonal's mean added, the error of a row is |(w - q) R|^2. A remaining number is chosen such
that its column's element is 0; one that becomes 0 leaves its own. Of 4 neighbours the 2 of least (w R_jj)^2 go, with w
as updated by the columns before the four. R is the inverse of the paper's Cholesky factor of H^-1.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mlcpipe.pruning.pattern import GROUP, PRUNED, prune_matrices
from mlcpipe.pruning.work import Array, PrunedTensor, Work, smallest
from mlcpipe.quantization.gptq import triangular_factor
from mlcpipe.quantization.inputs import Inputs

GRAM, UNITS = True, ""
_BLOCK = 128  # columns whose errors are propagated together
_ROWS = 1 << 23  # elements at a time


def pruned(work: Work) -> Iterator[PrunedTensor]:
    """See the package."""
    return prune_matrices(work, prune_matrix)


def prune_matrix(w: Array, inputs: Inputs) -> Array:
    """w float32[N, K] -> another with 2 of 4 neighbours in a row 0. `inputs` have their `gram`."""
    r = triangular_factor(inputs, w.shape[1])
    step = max(1, _ROWS // w.shape[1])
    return np.concatenate([_prune_rows(w[begin : begin + step], r) for begin in range(0, len(w), step)])


def _prune_rows(w: Array, r: Array) -> Array:
    columns = np.ascontiguousarray(w.T)
    errors, k = np.zeros_like(columns), len(columns)
    for begin in range(0, k, _BLOCK):
        end = min(begin + _BLOCK, k)
        due = r[:begin, begin:end].T @ errors[:begin]  # float32[columns of the block, rows]
        for first in range(begin, end, GROUP):
            four, here = slice(first, first + GROUP), slice(first - begin, first - begin + GROUP)
            errors[four] = _errors(columns[four], r[four, four], due[here])
            due[here.stop :] += r[four, four.stop : end].T @ errors[four]
    return np.ascontiguousarray((columns - errors).T)


def _errors(w: Array, r: Array, due: Array) -> Array:
    """The errors w - q of four columns w float32[4, rows]. `due` is the part of their elements from earlier errors."""
    wanted = w + np.linalg.inv(r).T @ due
    zero = smallest((wanted * np.diag(r)[:, None]).T ** 2, PRUNED).T
    errors, due = np.empty_like(w), due.copy()
    for j in range(GROUP):
        errors[j] = np.where(zero[j], w[j], -due[j] / r[j, j])
        due[j + 1 :] += r[j, j + 1 :, None] * errors[j]
    return errors
