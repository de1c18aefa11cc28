"""Products with packed weights, of one row (GEMV) and of several (GEMM)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from tvm import tirx

from mlcpipe.nn import definitions
from mlcpipe.quantization.native_formats import SCHEMES
from tests.kernels.cases.cpu.matmul import INTEGERS as FORMS
from tests.kernels.cases.cpu.matmul import scheme_named
from tests.kernels.cases.gpu.case import LAYOUT, ROW_WORDS, Array, Call, Knobs, assert_near, by_rules, packed_weight
from tir_schedules.op import with_facts

ROWS = 64  # of the most rows that are computed together in FEW
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

    def definition(self) -> tirx.PrimFunc:
        """The function without a schedule."""
        scheme = scheme_named(self.scheme)
        if self.gated:
            return definitions.gated_matmul(scheme, LAYOUT, self.n, self.k, "silu", self.dtype)
        return definitions.matmul(scheme, LAYOUT, self.n, self.k, self.dtype)

    def functions(self, knobs: Knobs) -> Mapping[str, tirx.PrimFunc]:
        return {"main": by_rules(self.definition(), {**knobs, **self.knobs})}

    def calls(self) -> Sequence[Call]:
        packed, weight = packed_weight(self.scheme, self.n, self.k)
        xs = [np.random.default_rng(m).standard_normal((m, self.k)).astype(self.dtype) for m in self.rows]
        return [self.call(x, packed, weight) for x in xs]

    def call(self, x: Array, packed: list[Array], weight: Array) -> Call:
        """A call with these rows, and their check against numpy."""
        y = x.astype(np.float64) @ weight.astype(np.float64).T
        if self.gated:
            gate, up = np.split(y, 2, axis=1)
            y = gate * (1 + np.tanh(gate / 2)) / 2 * up  # does not overflow
        args = (x, *packed, np.full(y.shape, np.nan, self.dtype))
        return Call(args, lambda found: assert_near(found[-1], y, TOLERANCES[self.dtype]))


@dataclass(frozen=True)
class FewRows(Product):
    """A product of few rows: each row of y is the same, bit for bit, whichever rows are computed with it."""

    def functions(self, knobs: Knobs) -> Mapping[str, tirx.PrimFunc]:
        return {"main": by_rules(with_facts(self.definition(), rows="few"), {**knobs, **self.knobs})}

    def calls(self) -> Sequence[Call]:
        packed, weight = packed_weight(self.scheme, self.n, self.k)
        x = np.random.default_rng(0).standard_normal((ROWS, self.k)).astype(self.dtype)
        together: list[Array] = []

        def call(first: int, m: int) -> Call:
            one = self.call(x[first : first + m], packed, weight)

            def check(found: list[Array]) -> None:
                one.check(found)
                together.append(found[-1])  # the first call has all rows
                np.testing.assert_array_equal(found[-1], together[0][first : first + m])

            return replace(one, check=check)

        return [call(first, m) for first, m in ((0, ROWS), (0, 1), (5, 1), (0, 2), (1, 3), (2, 7), (0, 8), (3, 9))]


@dataclass(frozen=True)
class Take:
    """Rows of a packed table [n, k]; an id outside of it reads the nearest row. `gathered`: the host has looked them up."""

    scheme: str
    n: int
    k: int
    gathered: bool = False

    def functions(self, knobs: Knobs) -> Mapping[str, tirx.PrimFunc]:
        scheme = scheme_named(self.scheme)
        if self.gathered:
            return {"main": by_rules(definitions.rows(scheme, ROW_WORDS, self.k, "float32"), knobs)}
        return {"main": by_rules(definitions.take(scheme, LAYOUT, self.n, self.k, "float32"), knobs)}

    def calls(self) -> Sequence[Call]:
        packed, weight = packed_weight(self.scheme, self.n, self.k, layout=ROW_WORDS if self.gathered else LAYOUT)
        ids = np.array([0, 33, self.n - 1, self.n + 5, -2], np.int32)
        places = np.clip(ids, 0, self.n - 1)
        expected = weight[places].astype(np.float64)
        packed = [array[places] for array in packed] if self.gathered else [*packed, ids]
        args = (*packed, np.full(expected.shape, np.nan, np.float32))
        return [Call(args, lambda found: assert_near(found[-1], expected, 2.0**-22))]


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
_NO_SUBGROUPS = {"subgroup": 0}
FEW = {
    **{f"few rows: {name}": FewRows(p.scheme, p.n, p.k, p.dtype, p.gated) for name, p in PLAIN.items()},
    "few rows: head": FewRows("q4f16_1", 800, 64),
    "few rows: gated int8, activations in float16": FewRows("q8f16_1", 128, 128, "float16", True),
    "few rows: int4 without subgroups": FewRows("q4f16_1", 96, 576, knobs=_NO_SUBGROUPS),
    "few rows: gated int8 without subgroups": FewRows("q8f16_1", 192, 128, gated=True, knobs=_NO_SUBGROUPS),
    "few rows: int3 in words that are cut off": FewRows("q3f16_1", 70, 90),
    "few rows: float16 without subgroups": FewRows("q0f16", 70, 41, knobs=_NO_SUBGROUPS),
}
# Float16 on matrix units, where there are any: more columns than stages or subgroups share evenly, tiles and blocks that
# are not full, and each way to read a weight.
UNITS = {
    "many rows: int4": Product("q4f16_1", 160, 288, "float16", rows=(9, 137)),
    "many rows: gated int8": Product("q8f16_1", 320, 224, "float16", True, rows=(70,)),
    "many rows: float16": Product("q0f16", 72, 160, "float16", rows=(65,)),
    "many rows: float16, columns that fill no stage": Product("q0f16", 64, 72, "float16", rows=(17,)),
    "many rows: gated Q6_K": Product("Q6_K", 192, 256, "float16", True, rows=(67,)),
    "few rows: int4 of many columns, activations in float16": FewRows("q4f16_1", 96, 2112, "float16"),
    "few rows: odd groups, activations in float16": FewRows("q4f16_1", 70, 160, "float16"),
    "few rows: gated int4, activations in float16": FewRows("q4f16_1", 192, 1152, "float16", True),
    "few rows: float16, activations too": FewRows("q0f16", 72, 584, "float16"),
    "few rows: Q4_K, activations in float16": FewRows("Q4_K", 96, 1280, "float16"),
    "few rows: uint4, activations in float16": FewRows("uint4_g128_f16", 96, 512, "float16"),
}
# All widths of codes; groups of 16, 32 and 128; tables; minima; each form of scales.
KEPT = {
    **{name: Product(name, 70, 256) for name in ("Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q6_K", "IQ4_XS", "NVFP4")},
    "scales of Q5_0 that are odd": Product("Q5_0", 64, 96),
    "gated Q4_K": Product("Q4_K", 128, 256, gated=True),
    "Q4_K, activations in float16": Product("Q4_K", 96, 256, "float16"),
    "Q6_K, activations in float16": Product("Q6_K", 96, 256, "float16"),
    "few rows: Q6_K": FewRows("Q6_K", 96, 512),
    "few rows: Q4_K without subgroups": FewRows("Q4_K", 96, 512, knobs=_NO_SUBGROUPS),
    **{f"{name} without subgroups": Product(name, 70, 256, knobs=_NO_SUBGROUPS) for name in ("Q1_0", "IQ1_M", "MXFP4")},
    **{f"rows of {name}": Take(name, 70, 256) for name in ("Q4_K", "IQ2_XS", "NVFP4")},
    **{f"gathered rows of {name}": Take(name, 70, 512, True) for name in ("Q5_K", "Q6_K", "q4f16_1", "q0f16")},
}
# Integers of other checkpoints: zero points, minima and neither; rows, odd groups; every dtype of scales.
INTEGERS = {
    **{
        name: Product(name, 70, 256)
        for name in ("uint4_g128_f16", "affine4_g64_bf16", "int8_g128_bf16", "uint3_row_f32", "fp4_g16_f32")
    },
    "uint4 in groups that are odd": Product("uint4_g32_f16", 64, 96),
    "gated uint4": Product("uint4_g64_bf16", 128, 256, gated=True),
    "uint4, activations in float16": Product("uint4_g128_f16", 96, 256, "float16"),
    "few rows: affine8": FewRows("affine8_g64_f16", 96, 512),
    "few rows: uint4 without subgroups": FewRows("uint4_g128_f16", 96, 512, knobs=_NO_SUBGROUPS),
    **{
        f"{name} without subgroups": Product(name, 70, 256, knobs=_NO_SUBGROUPS)
        for name in ("affine4_g64_bf16", "uint8_g32_f32", "int2_row_f32")
    },
    **{f"rows of {name}": Take(name, 70, 256) for name in ("uint4_g128_f16", "affine8_g64_bf16", "int6_row_f32")},
    **{f"gathered rows of {name}": Take(name, 70, 512, True) for name in ("uint4_g128_f16", "affine8_g64_bf16")},
}
EVERY_KEPT = {
    f"{name}{' without subgroups' if knobs else ''}, all": Product(name, 70, 512, rows=(1, 6, 37), knobs=knobs)
    for name in (*SCHEMES, *FORMS)
    for knobs in ({}, _NO_SUBGROUPS)
}
EVERY_KEPT |= {f"rows of {name}, all": Take(name, 70, 512) for name in (*SCHEMES, *FORMS)}  # type: ignore[dict-item]
EVERY_KEPT |= {f"gathered rows of {name}, all": Take(name, 70, 512, True) for name in (*SCHEMES, *FORMS)}  # type: ignore[dict-item]
# Rows that end inside of a tile; groups whose scales share a word, or not.
MATRICES = {
    "int4": ("q4f16_1", 160, 64, "float16", False),
    "gated int4": ("q4f16_1", 128, 96, "float16", True),
    "int8": ("q8f16_1", 64, 64, "float16", False),
    "gated float16": ("q0f16", 128, 32, "float16", True),
    "Q5_K": ("Q5_K", 64, 256, "float16", False),
    "gated Q6_K": ("Q6_K", 128, 256, "float16", True),
    "uint4": ("uint4_g64_f16", 64, 256, "float16", False),
}
OTHER_TILE = tile(8, 8, 8, 2, 2, 4)  # 64 threads, two SIMD groups side by side
SIMD_GROUPS = {
    **{f"matrices: {name}": Product(*case, rows=(37,)) for name, case in MATRICES.items()},
    "matrices of another shape": Product("q4f16_1", 160, 96, "float16", rows=(21,), knobs=OTHER_TILE),
    "matrices of another shape, gated": Product("q8f16_1", 128, 64, "float16", True, (21,), OTHER_TILE),
}
