"""Cases of short convolutions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from tvm import tirx

from tests.kernels.cases.short_conv import STEPS, conv_call
from tests.kernels.harness import Case
from tir_schedules.conv_shape import ConvShape
from tir_schedules.cpu.short_conv import short_conv

# Whole vectors, work for all threads, channels without a vector; two taps, and more than rows.
SHAPES = (
    ConvShape(64, 3, "float32"),
    ConvShape(2048, 3, "float32"),
    ConvShape(5, 7, "float32"),
    ConvShape(24, 2, "float32", bias=True, activation="silu"),
)


@dataclass(frozen=True)
class ConvKernel:
    """short_conv."""

    shape: ConvShape

    @property
    def symbol(self) -> str:
        return f"short_conv_{self.shape.channels}_{self.shape.taps}"

    def definition(self) -> None:
        return None

    def build(self) -> tirx.PrimFunc:
        return short_conv(self.shape)


def cases() -> Iterator[Case]:
    """All shapes in all steps."""
    for kernel in map(ConvKernel, SHAPES):
        for step, parts in STEPS.items():
            call = partial(conv_call, kernel.shape, parts)
            yield Case(f"{kernel.symbol}-{step}", "short_conv", kernel, call)
