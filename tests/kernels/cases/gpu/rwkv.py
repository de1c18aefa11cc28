"""The recurrence of RWKV-7, and the states that it keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tvm import tirx

from tests.kernels.cases.gpu.case import Array, Call, Knobs
from tests.kernels.cases.rwkv import rwkv_call
from tests.kernels.cases.short_conv import STEPS, Part
from tests.kernels.harness import assert_within
from tir_schedules.gpu.rwkv import rwkv
from tir_schedules.rwkv_shape import RwkvShape

MANY = [Part(1, i, i) if i < 6 else Part(1) for i in range(70)]  # more sequences than workgroups for a head


@dataclass(frozen=True)
class Rwkv:
    """All steps."""

    shape: RwkvShape

    def functions(self, knobs: Knobs) -> Mapping[str, tirx.PrimFunc]:
        return {"main": rwkv(self.shape)}

    def calls(self) -> Sequence[Call]:
        return [self._call(parts) for parts in (*STEPS.values(), MANY)]

    def _call(self, parts: list[Part]) -> Call:
        call = rwkv_call(self.shape, parts)

        def check(found: list[Array]) -> None:
            for index, (expected, bound) in call.expected.items():
                assert_within(found[index].astype("float64"), expected, bound, f"argument {index}")

        return Call(call.args, check)


CASES = {"RWKV-7": Rwkv(RwkvShape(3, 64)), "RWKV-7 of small heads": Rwkv(RwkvShape(2, 12))}
