"""The router of a mixture of experts: the best first, and NaN where a logit is no number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from tvm import tirx

from mlcpipe.nn.moe import moe_route
from tests.kernels.cases.gpu.case import Array, Call, Knobs, by_rules

EXPERTS, CHOSEN = 16, 3


@dataclass(frozen=True)
class Route:
    """Four tokens with NaN of either sign or infinity among the logits, then 96 without."""

    normalize: bool

    def functions(self, knobs: Knobs) -> Mapping[str, tirx.PrimFunc]:
        return {"main": by_rules(moe_route(EXPERTS, CHOSEN, self.normalize), knobs)}

    def calls(self) -> Sequence[Call]:
        # One decimal: many equal logits.
        logits = np.random.default_rng(4).normal(0, 2, (100, EXPERTS)).round(1).astype(np.float32)
        logits[0], logits[1, 5], logits[2, 0], logits[3, 15] = np.nan, -np.nan, np.nan, np.inf
        chosen = np.argsort(-logits[4:], axis=1, kind="stable")[:, :CHOSEN]
        shares = np.exp(logits[4:].astype(np.float64))
        shares = np.take_along_axis(shares / shares.sum(1, keepdims=True), chosen, 1)
        shares /= shares.sum(1, keepdims=True) if self.normalize else 1

        def check(found: list[Array]) -> None:
            _, weights, ids = found
            assert np.isnan(weights[:4]).all() and ((ids[:4] >= 0) & (ids[:4] < EXPERTS)).all()
            np.testing.assert_array_equal(ids[4:], chosen)
            np.testing.assert_allclose(weights[4:], shares, rtol=0, atol=1e-6)

        return [Call((logits, np.zeros((100, CHOSEN), np.float32), np.full((100, CHOSEN), -1, np.int32)), check)]


CASES = {"route": Route(False), "route of chosen": Route(True)}
