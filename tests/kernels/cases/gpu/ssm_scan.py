"""Scans of Mamba-2, and the states that they keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tvm import tirx

from tests.kernels.cases.gpu.case import Array, Call, Knobs
from tests.kernels.cases.short_conv import STEPS, Part
from tests.kernels.cases.ssm_scan import scan_call
from tests.kernels.harness import assert_within
from tir_schedules.gpu.ssm_scan import ssm_scan
from tir_schedules.ssm_shape import SsmShape

MANY = [Part(1, i, i) if i < 6 else Part(1) for i in range(70)]  # more sequences than workgroups for a block


@dataclass(frozen=True)
class SsmScan:
    """All steps."""

    shape: SsmShape

    def functions(self, knobs: Knobs) -> Mapping[str, tirx.PrimFunc]:
        return {"main": ssm_scan(self.shape)}

    def calls(self) -> Sequence[Call]:
        return [self._call(parts) for parts in (*STEPS.values(), MANY)]

    def _call(self, parts: list[Part]) -> Call:
        call = scan_call(self.shape, parts)

        def check(found: list[Array]) -> None:
            for index, (expected, bound) in call.expected.items():
                assert_within(found[index].astype("float64"), expected, bound, f"argument {index}")

        return Call(call.args, check)


CASES = {
    "scan": SsmScan(SsmShape(4, 32, 128, 1, 300, "float32")),
    "scan of groups in float16": SsmScan(SsmShape(9, 24, 20, 3, 345, "float16")),
    "scan of channels": SsmScan(SsmShape(48, 1, 16, 1, 48, "float32", channelwise=True)),
    "scan of steady decays": SsmScan(SsmShape(2, 16, 32, 2, 0, "float32", steady=True)),
}
