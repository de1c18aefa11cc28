"""Cases of scans of Mamba-2."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from tvm import tirx

from tests.kernels.cases.short_conv import STEPS
from tests.kernels.cases.ssm_scan import scan_call
from tests.kernels.harness import Case
from tir_schedules.cpu.ssm_scan import ssm_scan
from tir_schedules.ssm_shape import SsmShape

# Whole vectors and work for all threads; several groups, blocks of 8 channels and heads without a vector; Mamba; lightning attention.
SHAPES = (
    SsmShape(16, 64, 128, 1, 2336, "float32"),
    SsmShape(9, 24, 20, 3, 345, "float32"),
    SsmShape(24, 1, 16, 1, 24, "float32", channelwise=True),
    SsmShape(4, 16, 16, 4, 0, "float32", steady=True),
)


@dataclass(frozen=True)
class ScanKernel:
    """ssm_scan."""

    shape: SsmShape

    @property
    def symbol(self) -> str:
        return f"ssm_scan_{self.shape.heads}_{self.shape.head_dim}"

    def definition(self) -> None:
        return None

    def build(self) -> tirx.PrimFunc:
        return ssm_scan(self.shape)


def cases() -> Iterator[Case]:
    """All shapes in all steps."""
    for kernel in map(ScanKernel, SHAPES):
        for step, parts in STEPS.items():
            call = partial(scan_call, kernel.shape, parts)
            yield Case(f"{kernel.symbol}-{step}", "ssm_scan", kernel, call)
