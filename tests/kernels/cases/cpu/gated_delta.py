"""Cases of gated delta rules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from tvm import tirx

from tests.kernels.cases.gated_delta import delta_call
from tests.kernels.cases.short_conv import STEPS
from tests.kernels.harness import Case
from tir_schedules.cpu.gated_delta import gated_delta
from tir_schedules.delta_shape import DeltaShape

# Whole vectors, shared keys in both orders, a beta of up to 2, sizes without a vector; decays of channels.
SHAPES = (
    DeltaShape(2, 2, 128, 128, "float32"),
    DeltaShape(2, 4, 16, 32, "float32", tiled=True),
    DeltaShape(2, 4, 12, 24, "float32", beta_scale=2.0),
    DeltaShape(1, 1, 6, 3, "float32"),
    DeltaShape(2, 2, 32, 16, "float32", channelwise=True),
    DeltaShape(2, 4, 12, 24, "float32", channelwise=True, floor=-5.0),
)


@dataclass(frozen=True)
class DeltaKernel:
    """gated_delta."""

    shape: DeltaShape

    @property
    def symbol(self) -> str:
        shape = self.shape
        return f"gated_delta_{shape.value_heads}_{shape.key_dim}_{'many' if shape.many else 'few'}{'_each' * shape.channelwise}"

    def definition(self) -> None:
        return None

    def build(self) -> tirx.PrimFunc:
        return gated_delta(self.shape)


def cases() -> Iterator[Case]:
    """All shapes in all steps, for steps and for prompts."""
    for shape in SHAPES:
        for kernel in (DeltaKernel(shape), DeltaKernel(replace(shape, many=True))):
            for step, parts in STEPS.items():
                yield Case(f"{kernel.symbol}-{step}", "gated_delta", kernel, partial(delta_call, kernel.shape, parts))
