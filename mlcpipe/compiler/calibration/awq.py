"""AWQ (Lin et al. 2023): columns whose errors matter most are scaled up before rounding.

The producer of a matrix's input is divided by the factors (`fold.py`). They are powers of the inputs' size; of a few
powers the one of least output error is taken, with inputs rounded to int8 as on the CPU.
It pays for models with a few large channels, whose loss it removes; for others GPTQ loses less (docs/quality.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tvm.relax.frontend import nn

from mlcpipe.compiler.calibration.fold import Fold, Folded, folds_of
from mlcpipe.quantization.inputs import Inputs
from mlcpipe.quantization.packing import pack, unpack
from mlcpipe.quantization.scheme import Scheme
from mlcpipe.support.defaults import SEARCH

Array = NDArray[Any]

_POWERS = np.linspace(0.1, 1.0, 10)
_GROUP = 32  # columns of an input with one scale of int8, see tir_schedules/cpu/int8_activations.py
_ROWS = 512  # of each matrix, to measure the error with
SAMPLE = 512  # rows of their inputs


def fold_layer(
    layer: nn.Module,
    named: Callable[[str], str],
    schemes: Mapping[str, Scheme],
    folded: Folded,
    inputs: Mapping[str, Inputs],
    *,
    exact: bool = False,
) -> dict[str, Inputs]:
    """Fold factors into the tensors of a layer, which the checkpoint has as `named` -> the inputs of its matrices then.

    `schemes` are those of matrices. `inputs` have rows. `exact`: factors are powers of two, so that numbers keep their
    digits.
    """
    found = dict(inputs)
    for fold in folds_of(layer):
        consumers = [named(name) for name in fold.consumers]
        matrices = [folded.read(name) for name in consumers]
        factors = factors_of(fold, matrices, schemes[consumers[0]], inputs[consumers[0]], exact=exact)
        if (factors == 1).all():
            continue
        folded.fold(fold, named, factors)
        for name in consumers:
            found[name] = inputs[name].scaled(1 / factors)
    return found


def factors_of(fold: Fold, matrices: Sequence[Array], scheme: Scheme, inputs: Inputs, *, exact: bool = False) -> Array:
    """The factors float32[K] of least output error; 1 if no others are better. `exact`: powers of two."""
    assert inputs.rows is not None
    w = np.concatenate([matrix[:: -(-len(matrix) // (_ROWS // len(matrices)))] for matrix in matrices])
    expected = inputs.rows @ w.T
    best = np.ones(w.shape[1], np.float32)
    least = output_error(best, w, scheme, inputs, expected)
    for size in (np.sqrt(inputs.mean_square), inputs.peak):
        for power in _POWERS:
            least_size = size.max() * np.float32(1e-4) + np.float32(1e-30)
            factors = _shared(fold, np.maximum(size, least_size) ** np.float32(power))
            factors /= np.sqrt(factors.max() * factors.min())
            if exact:
                factors = np.exp2(np.rint(np.log2(factors)))
            error = output_error(factors, w, scheme, inputs, expected)
            if error < least:
                best, least = factors, error
    return best


def _shared(fold: Fold, factors: Array) -> Array:
    """The largest of the factors that must be equal."""
    if fold.heads is None:
        return factors
    by_head = factors.reshape(fold.heads)
    shared: Array = np.broadcast_to(by_head.max(axis=1, keepdims=True), by_head.shape).reshape(-1).copy()
    return shared


def output_error(factors: Array, w: Array, scheme: Scheme, inputs: Inputs, expected: Array) -> float:
    """Squared error of the outputs of rounded weights for rounded inputs."""
    folded = inputs.scaled(1 / factors)
    assert folded.rows is not None
    rounded = unpack(scheme, pack(scheme, w * factors, method=SEARCH, inputs=folded), w.shape[1])
    return float(((_int8(folded.rows) @ rounded.T - expected) ** 2).sum())


def _int8(x: Array) -> Array:
    """x[n, K] rounded to int8 with a scale for each `_GROUP` columns of a row."""
    n, k = x.shape
    padded = np.zeros((n, -(-k // _GROUP), _GROUP), np.float32)
    padded.reshape(n, -1)[:, :k] = x
    steps = np.abs(padded).max(axis=2, keepdims=True) / np.float32(127)
    steps[steps == 0] = 1
    rounded: Array = (np.rint(padded / steps) * steps).reshape(n, -1)[:, :k]
    return rounded
