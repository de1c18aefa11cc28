"""RMS norms, of a tensor and of a sum of two."""

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
    """Two rows; `added`: of a sum, which is an output too."""

    added: bool

    def functions(self, knobs: Knobs) -> Mapping[str, tirx.PrimFunc]:
        define = definitions.add_rms_norm if self.added else definitions.rms_norm
        return {"main": by_rules(define(SIZE, EPS, "float32", "float32"), knobs)}

    def calls(self) -> Sequence[Call]:
        rng = np.random.default_rng(3)
        a, b = (rng.standard_normal((2, SIZE)).astype(np.float32) for _ in range(2))
        weight = rng.standard_normal(SIZE).astype(np.float32)
        x = (a + b if self.added else a).astype(np.float64)
        outputs = [np.full((2, SIZE), np.nan, np.float32) for _ in range(1 + self.added)]

        def check(found: list[Array]) -> None:
            assert_near(found[-1], x / np.sqrt((x * x).mean(axis=1, keepdims=True) + EPS) * weight, 1e-6)
            if self.added:
                assert_near(found[-2], x, 1e-7)

        return [Call((*([a, b] if self.added else [a]), weight, *outputs), check)]


CASES = {"norm": Norm(False), "norm of a sum": Norm(True)}
