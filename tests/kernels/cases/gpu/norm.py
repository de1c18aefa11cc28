"""RMS and layer norms, of a tensor and of a sum of two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from tvm import tirx

from mlcpipe.nn import definitions
from tests.kernels.cases.gpu.case import Array, Call, Knobs, assert_near, by_rules

SIZE, EPS = 100, 1e-5  # a size that fills no round of a workgroup


@dataclass(frozen=True)
class Norm:
    """Two rows; `added`: of a sum, which is an output too. Layer norm with so many `biases`, None: RMS norm."""

    added: bool
    biases: int | None = None

    def functions(self, knobs: Knobs) -> Mapping[str, tirx.PrimFunc]:
        if self.biases is not None:
            func = definitions.layer_norm(
                SIZE, EPS, "float32", "float32", biased=bool(self.biases), residual=self.added
            )
            return {"main": by_rules(func, knobs)}
        define = definitions.add_rms_norm if self.added else definitions.rms_norm
        return {"main": by_rules(define(SIZE, EPS, "float32", "float32"), knobs)}

    def calls(self) -> Sequence[Call]:
        rng = np.random.default_rng(3)
        a, b = (rng.standard_normal((2, SIZE)).astype(np.float32) for _ in range(2))
        weight = rng.standard_normal(SIZE).astype(np.float32)
        x = (a + b if self.added else a).astype(np.float64)
        biases = [rng.standard_normal(SIZE).astype(np.float32) for _ in range(self.biases or 0)]
        centred = x if self.biases is None else x - x.mean(axis=1, keepdims=True)
        y = centred / np.sqrt((centred * centred).mean(axis=1, keepdims=True) + EPS) * weight + sum(biases)
        outputs = [np.full((2, SIZE), np.nan, np.float32) for _ in range(1 + self.added)]

        def check(found: list[Array]) -> None:
            assert_near(found[-1], y, 1e-6)
            if self.added:
                assert_near(found[-2], x, 1e-7)

        return [Call((*([a, b] if self.added else [a]), weight, *biases, *outputs), check)]


CASES = {
    "norm": Norm(False),
    "norm of a sum": Norm(True),
    "layer norm": Norm(False, 1),
    "layer norm of a sum": Norm(True, 1),
    "layer norm without bias": Norm(True, 0),
}
