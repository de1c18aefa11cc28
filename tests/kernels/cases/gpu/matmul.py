"""Products with packed weights, of one row (GEMV) and of several (GEMM)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from tvm import tirx

from mlcpipe.nn import definitions
from mlcpipe.quantization.scheme import load_scheme
from tests.kernels.cases.gpu.case import LAYOUT, Array, Call, Knobs, assert_near, by_rules, packed_weight

TOLERANCES = {"float32": 3e-6, "float16": 1e-3}  # of the largest output


@dataclass(frozen=True)
class Product:
    """x dtype[m, k] times a weight [n, k] in a scheme, for each m of `rows`; `gated`: silu(half) * other half."""

    scheme: str
    n: int
    k: int
    dtype: str = "float32"
    gated: bool = False
    rows: tuple[int, ...] = (1, 6)  # 6: a tile of 4 rows and a part of one
    knobs: Mapping[str, int | str] = field(default_factory=dict)  # in place of the target's

    def functions(self, knobs: Knobs) -> Mapping[str, tirx.PrimFunc]:
        scheme = load_scheme(self.scheme)
        if self.gated:
            func = definitions.gated_matmul(scheme, LAYOUT, self.n, self.k, "silu", self.dtype)
        else:
            func = definitions.matmul(scheme, LAYOUT, self.n, self.k, self.dtype)
        return {"main": by_rules(func, {**knobs, **self.knobs})}

    def calls(self) -> Sequence[Call]:
        packed, weight = packed_weight(self.scheme, self.n, self.k)
        return [self._call(m, packed, weight) for m in self.rows]

    def _call(self, m: int, packed: list[Array], weight: Array) -> Call:
        x = np.random.default_rng(m).standard_normal((m, self.k)).astype(self.dtype)
        y = x.astype(np.float64) @ weight.astype(np.float64).T
        if self.gated:
            gate, up = np.split(y, 2, axis=1)
            y = gate / (1 + np.exp(-gate)) * up
        args = (x, *packed, np.full(y.shape, np.nan, self.dtype))
        return Call(args, lambda found: assert_near(found[-1], y, TOLERANCES[self.dtype]))


def tile(rows: int, columns: int, depth: int, subgroups: int, tall: int, wide: int, buffers: int = 2) -> dict[str, int]:
    """The knobs of a tile of cooperative matrices."""
    names = ("rows", "columns", "depth", "subgroups", "tall", "wide", "buffers")
    values = (rows, columns, depth, subgroups, tall, wide, buffers)
    return {f"matrix_{name}": value for name, value in zip(names, values)}


PLAIN = {
    "int4": Product("q4f16_1", 96, 576),  # 9 units of columns: 4 subgroups of 16 have one or two
    "int4, groups that are odd, rows that fill no block": Product("q4f16_1", 70, 160),
    "int4, scales in float32": Product("q4f32_1", 64, 64),
    "int8": Product("q8f16_1", 96, 128),
    "float16": Product("q0f16", 64, 40),
    "float32": Product("q0f32", 40, 24),
    "activations in float16": Product("q4f16_1", 64, 128, "float16"),
    "int8, activations in float16": Product("q8f16_1", 160, 128, "float16"),
    "gate": Product("q4f16_1", 128, 64, gated=True),
}
# Rows that end inside of a tile; groups whose scales share a word, or not.
MATRICES = {
    "int4": ("q4f16_1", 160, 64, "float16", False),
    "gated int4": ("q4f16_1", 128, 96, "float16", True),
    "int8": ("q8f16_1", 64, 64, "float16", False),
    "gated float16": ("q0f16", 128, 32, "float16", True),
}
OTHER_TILE = tile(8, 8, 8, 2, 2, 4)  # 64 threads, two SIMD groups side by side
SIMD_GROUPS = {
    **{f"matrices: {name}": Product(*case, rows=(37,)) for name, case in MATRICES.items()},
    "matrices of another shape": Product("q4f16_1", 160, 96, "float16", rows=(21,), knobs=OTHER_TILE),
    "matrices of another shape, gated": Product("q8f16_1", 128, 64, "float16", True, (21,), OTHER_TILE),
}
