"""How long `gptq` will take, before it begins: its operations, at the rate of a product of matrices on this machine."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from mlcpipe.support.defaults import CALIBRATION_TOKENS
from mlcpipe.weights.table import Weight

# Of that rate, as the layers, sums and roundings of two layers in Llama 3.2 1B's shape reached it: docs/quality.md.
_SHARE = 0.6
_KERNELS_S = 10  # to compile the layers, of two processors then
_SIDE = 1024  # of the matrices of the product, three times


def operations(weights: Sequence[Weight]) -> float:
    """Multiplications and additions of `gptq` for matrices w[n, k], each of its own input x.

    Each layer runs on the calibration text twice, other matrices do not; x^T x is summed, and factored in k^3; rounding
    takes n k^2. Of experts each has its share of the tokens.
    """
    total = 0.0
    for weight in weights:
        if weight.kind == "scheme":
            (n, k), each = weight.shape[-2:], weight.experts or 1
            tokens = CALIBRATION_TOKENS * float(weight.reads) * each
            runs = 2 if "layers." in weight.name else 0
            total += 2 * tokens * k * (runs * n + k) + each * k * k * (n + k)
    return total


def expected_duration(weights: Sequence[Weight]) -> str:
    """A line that says how long it will take, and how that was estimated; measures for a tenth of a second."""
    a, rates = np.ones((_SIDE, _SIDE), np.float32), []
    for _ in range(3):
        began = time.perf_counter()
        a @ a
        rates.append(2 * _SIDE**3 / (time.perf_counter() - began))
    count, rate = operations(weights), max(rates)
    minutes = (_KERNELS_S + count / (rate * _SHARE)) / 60
    about = f"{minutes:.0f} minutes" if minutes >= 2 else f"{60 * minutes:.0f} seconds"
    return (
        f"gptq will take about {about}: {_KERNELS_S} seconds for its kernels and {count:.1e} operations, at "
        f"{_SHARE:.0%} of the {rate / 1e9:.0f} GFLOP/s that a product of matrices just had here"
    )
