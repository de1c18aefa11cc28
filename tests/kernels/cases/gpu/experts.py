"""Products by the weights of experts that are chosen for each row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from tvm import tirx

from mlcpipe.nn import definitions
from tests.kernels.cases.cpu.matmul import scheme_named
from tests.kernels.cases.gpu.case import LAYOUT, Array, Call, Knobs, assert_near, by_rules, packed_weight

TOLERANCES = {"float32": 3e-6, "float16": 2e-3}  # of the largest output


@dataclass(frozen=True)
class Experts:
    """Rows of x by the weights of chosen experts; `common`: x has one row per token, not one per token and expert.

    `ids` i32[tokens, top]; a number that is too large means the last expert.
    """

    scheme: str
    common: bool
    n: int
    k: int
    experts: int
    ids: tuple[tuple[int, ...], ...]
    dtype: str = "float32"

    def functions(self, knobs: Knobs) -> Mapping[str, tirx.PrimFunc]:
        scheme, top = scheme_named(self.scheme), len(self.ids[0])
        func = definitions.expert_matmul(scheme, LAYOUT, self.experts, self.n, self.k, top, self.common, self.dtype)
        return {"main": by_rules(func, knobs)}

    def calls(self) -> Sequence[Call]:
        packed, weight = packed_weight(self.scheme, self.n, self.k, self.experts)
        ids = np.array(self.ids, np.int32)
        rows = len(ids) if self.common else ids.size
        x = np.random.default_rng(5).standard_normal((rows, self.k)).astype(self.dtype)
        each = np.repeat(x, ids.shape[1], axis=0) if self.common else x
        y = np.einsum("rk,rnk->rn", each.astype(np.float64), weight[np.minimum(ids.ravel(), self.experts - 1)])
        args = (x, *packed, ids, np.full(y.shape, np.nan, self.dtype))
        return [Call(args, lambda found: assert_near(found[-1], y, TOLERANCES[self.dtype]))]


def _many(tokens: int, top: int, experts: int) -> tuple[tuple[int, ...], ...]:
    ids: Array = np.random.default_rng(13).integers(0, experts, (tokens, top))
    ids[3:20, 1] = 7  # more rows than a tile has
    ids[0, 0] = experts + 5
    return tuple(map(tuple, ids.tolist()))


_FEW = ((0, 3), (2, 2), (1, 9))
SMALL = {
    "experts of common rows": Experts("q4f16_1", True, 64, 96, 4, _FEW),
    "experts of their own rows": Experts("q4f16_1", False, 64, 96, 4, _FEW),
    "experts of Q4_K": Experts("Q4_K", True, 64, 256, 4, _FEW),
    "experts of uint4": Experts("uint4_g32_bf16", True, 64, 96, 4, _FEW),
    "experts of MXFP4": Experts("MXFP4", False, 64, 96, 4, _FEW),
}
# 96 rows are three blocks, of which a workgroup would have four.
TILES = {
    "many experts of common rows": Experts("q4f16_1", True, 96, 160, 40, _many(30, 4, 40), "float16"),
    "many experts of their own rows": Experts("q0f16", False, 96, 160, 40, _many(30, 4, 40), "float16"),
    "many experts of Q6_K": Experts("Q6_K", True, 96, 256, 40, _many(30, 4, 40), "float16"),
}
