"""Cases of low-rank adapters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from tvm import tirx

from tests.kernels.cases.adapters import ROWS, adapter_call, low_rank, step_of, stored_arrays
from tests.kernels.cases.cpu.int8 import HERE, knobs_of, quantized
from tests.kernels.cases.cpu.matmul import Matmul, gated, packed
from tests.kernels.harness import EPS, Call, Case, unwritten
from tir_schedules.adapter_shape import AdapterShape
from tir_schedules.cpu.adapted_matmul import adapted_matmul
from tir_schedules.cpu.adapters import add_adapters
from tir_schedules.cpu.int8_matmul import int8_matmul
from tir_schedules.op import op_of

# One chunk of K, several and a part of one; one part and three; tiles of 64, 32 and 16 columns.
SHAPES = (
    AdapterShape(64, (64,), "float16"),
    AdapterShape(1040, (32, 16, 16), "float16"),
    AdapterShape(512, (96, 96), "float32"),
    AdapterShape(1040, (64, 64), "uint8"),
)


@dataclass(frozen=True)
class AdapterKernel:
    """add_adapters."""

    shape: AdapterShape

    @property
    def symbol(self) -> str:
        return f"adapters_{self.shape.k}_{'_'.join(map(str, self.shape.parts))}_{self.shape.dtype}"

    def definition(self) -> None:
        return None

    def build(self) -> tirx.PrimFunc:
        return add_adapters(self.shape)


@dataclass(frozen=True)
class AdaptedMatmul:
    """Few rows times a packed weight with adapters; by integer dot products, or in float32 where `dot` is empty."""

    dot: str
    scheme: str
    shape: AdapterShape
    activation: str = ""

    @property
    def symbol(self) -> str:
        parts = "_".join(map(str, self.shape.parts))
        return f"adapted{self.activation}_{self.dot or 'float32'}_{self.scheme}_{self.shape.k}_{parts}"

    def definition(self) -> None:
        return None

    def build(self) -> tirx.PrimFunc:
        product = op_of(Matmul(self.scheme, self.shape.columns, self.shape.k).definition())
        assert product is not None
        func = adapted_matmul(product, self.shape, self.activation)
        assert func is not None
        if not self.dot:
            return func
        op = op_of(func)
        assert op is not None
        kernel = int8_matmul(op, knobs_of(self.dot))
        assert isinstance(kernel, tirx.PrimFunc), kernel
        return kernel

    def call(self, rows: list[tuple[int, int]]) -> Call:
        """x, packed weight, step, a, b, scale -> y."""
        shape, rng = self.shape, np.random.default_rng([self.shape.k, len(rows)])
        weight, w, w_size = packed(self.scheme, (shape.columns, shape.k), "normal")
        arrays = stored_arrays(shape, rng)
        x = rng.standard_normal((len(rows), shape.k)).astype(np.float32)
        seen = quantized(x) if self.dot else x.astype(np.float64)
        delta, size = low_rank(shape, rows, seen, arrays, 127 if self.dot else 0)
        bound = (shape.k + 64) * EPS * (np.abs(seen) @ w_size.T) + EPS * (shape.k + 64) * size
        expected, bound = gated(seen @ w.T + delta, bound, self.activation)
        return Call(
            (x, *weight, step_of(rows), *arrays, unwritten(expected.shape)), {len(weight) + 5: (expected, bound)}
        )


# Pieces of one group and of several, the last one shorter; parts that are joined; tiles of two blocks past the end.
ADAPTED = (
    ("q4f16_1", AdapterShape(128, (64, 32), "uint8"), ""),
    ("q4f16_1", AdapterShape(608, (32, 16, 16), "uint8"), ""),
    ("q4f16_1", AdapterShape(320, (48, 48), "uint8"), "silu"),
)


def adapted_cases(dot: str) -> Iterator[Case]:
    """Of one integer dot product, or in float32."""
    for kernel in (AdaptedMatmul(dot, *what) for what in ADAPTED):
        for name, rows in ROWS.items():
            yield Case(f"{kernel.symbol}-{name}", f"adapted-{dot or 'float32'}", kernel, partial(kernel.call, rows))


def cases() -> Iterator[Case]:
    """All shapes with all kinds of rows."""
    for kernel in map(AdapterKernel, SHAPES):
        for name, rows in ROWS.items():
            yield Case(
                f"{kernel.symbol}-{name}", "adapters", kernel, partial(adapter_call, kernel.shape, rows)
            )  # fmt: skip
    for dot in ("", *HERE):
        yield from adapted_cases(dot)
