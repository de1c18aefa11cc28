"""Cases of the recurrence of RWKV-7."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from tvm import tirx

from tests.kernels.cases.rwkv import rwkv_call
from tests.kernels.cases.short_conv import STEPS
from tests.kernels.harness import Case
from tir_schedules.cpu.rwkv import rwkv
from tir_schedules.rwkv_shape import RwkvShape

SHAPES = (RwkvShape(5, 64), RwkvShape(3, 12))


@dataclass(frozen=True)
class RwkvKernel:
    """rwkv."""

    shape: RwkvShape

    @property
    def symbol(self) -> str:
        return f"rwkv_{self.shape.heads}_{self.shape.dim}"

    def definition(self) -> None:
        return None

    def build(self) -> tirx.PrimFunc:
        return rwkv(self.shape)


def cases() -> Iterator[Case]:
    """All shapes in all steps."""
    for kernel in map(RwkvKernel, SHAPES):
        for step, parts in STEPS.items():
            yield Case(f"{kernel.symbol}-{step}", "rwkv", kernel, partial(rwkv_call, kernel.shape, parts))
