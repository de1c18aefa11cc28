"""Wanda (Sun et al. 2023, arXiv:2306.11695): of 4 neighbours in a row, 2 of least |w| * sqrt(mean of x^2) become 0."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mlcpipe.pruning.pattern import GROUP, PRUNED, prune_matrices
from mlcpipe.pruning.work import Array, PrunedTensor, Work, smallest
from mlcpipe.quantization.inputs import Inputs

GRAM, UNITS = False, ""


def pruned(work: Work) -> Iterator[PrunedTensor]:
    """See the package."""
    return prune_matrices(work, prune_matrix)


def prune_matrix(w: Array, inputs: Inputs) -> Array:
    """w float32[N, K] -> the same with 2 of 4 neighbours in a row 0."""
    scores = (np.abs(w) * np.sqrt(inputs.mean_square)).reshape(len(w), -1, GROUP)
    return np.where(smallest(scores, PRUNED).reshape(w.shape), np.float32(0), w)
