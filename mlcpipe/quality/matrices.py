"""The effect of a recipe on each matrix of a checkpoint: its bytes, and its relative error."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlcpipe.checkpoint import Checkpoint
from mlcpipe.compiler.job import stored_weights
from mlcpipe.quantization.packing import pack, unpack
from mlcpipe.quantization.recipe import QuantizationRecipe
from mlcpipe.quantization.scheme import Scheme
from mlcpipe.support.defaults import SEARCH
from mlcpipe.support.progress import Progress
from mlcpipe.targets import Target
from mlcpipe.weights.table import Weight, read_matrices

_SAMPLE = 1 << 20  # numbers per matrix on which its error is measured, to about 0.1 %


@dataclass(frozen=True)
class StoredMatrix:
    """One matrix: `scheme` is a name, `elements` are its numbers.

    `error` is the root mean square of the difference over that of the numbers, in evenly spaced rows.
    """

    name: str
    shape: tuple[int, ...]
    scheme: str
    nbytes: int
    elements: int
    error: float

    @property
    def bits(self) -> float:
        """Stored bits per number."""
        return 8 * self.nbytes / self.elements


def stored_matrices(
    checkpoint: Checkpoint, target: Target, recipe: QuantizationRecipe, method: str, progress: Progress
) -> list[StoredMatrix]:
    """Every matrix of a checkpoint as a recipe stores it for a target. Raises what `mlcpipe.compile` raises."""
    weights = [w for w in stored_weights(checkpoint, target, recipe) if w.kind == "scheme"]
    progress.stage("round the matrices")
    progress.steps_total(len(weights))
    found = []
    for weight in weights:
        assert weight.scheme is not None
        kept = {checkpoint.tensors[name].dtype for group in weight.sources for name in group} == {weight.scheme.name}
        error = 0.0 if kept else rounding_errors(weight, checkpoint, [weight.scheme], method)[0]
        elements = math.prod(weight.shape)
        found.append(
            StoredMatrix(
                weight.name, weight.shape, weight.scheme.name, weight.nbytes, elements, error
            )
        )  # fmt: skip
        progress.advance(1)
    return found


def rounding_errors(weight: Weight, checkpoint: Checkpoint, schemes: Sequence[Scheme], method: str) -> list[float]:
    """The relative error of a matrix, over all experts, in each of the schemes."""
    step = max(1, math.prod(weight.shape) // _SAMPLE)
    rows = np.concatenate([matrix[::step] for matrix in read_matrices(weight, checkpoint)])
    return [relative_error(rows, scheme, method) for scheme in schemes]


def relative_error(w: NDArray[Any], scheme: Scheme, method: str = SEARCH) -> float:
    """Root of sum (w - w')^2 / sum w^2 for w float32[N, K] and its stored form w'; 0 for zeros."""
    off = unpack(scheme, pack(scheme, w, method=method), w.shape[1]).astype(np.float64) - w
    power = float((w.astype(np.float64) ** 2).sum())
    return math.sqrt(float((off**2).sum()) / power) if power else 0.0
