"""Cases of short convolutions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from tvm import tirx

from tests.kernels.cases.short_conv import STEPS, conv_call, store_call
from tests.kernels.harness import Case
from tir_schedules.conv_shape import ConvShape
from tir_schedules.cpu.short_conv import conv_functions

# Whole vectors, work for all threads, channels without a vector; two taps, and more than rows.
SHAPES = (
    ConvShape(64, 3, "float32"),
    ConvShape(2048, 3, "float32"),
    ConvShape(5, 7, "float32"),
    ConvShape(24, 2, "float32"),
)


@dataclass(frozen=True)
class ConvKernel:
    """short_conv or store_conv."""

    name: str
    shape: ConvShape

    @property
    def symbol(self) -> str:
        return f"{self.name}_{self.shape.channels}_{self.shape.taps}"

    def definition(self) -> None:
        return None

    def build(self) -> tirx.PrimFunc:
        return conv_functions(self.shape)[self.name]


def cases() -> Iterator[Case]:
    """Both functions for all shapes and steps."""
    for shape in SHAPES:
        for name, call in (("short_conv", conv_call), ("store_conv", store_call)):
            kernel = ConvKernel(name, shape)
            for step, parts in STEPS.items():
                yield Case(f"{kernel.symbol}-{step}", "short_conv", kernel, partial(call, shape, parts))
