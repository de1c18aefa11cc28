"""Gated delta rules, and the states that they keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tvm import tirx

from tests.kernels.cases.gated_delta import delta_call
from tests.kernels.cases.gpu.case import Array, Call, Knobs
from tests.kernels.cases.short_conv import Part
from tests.kernels.harness import assert_within
from tir_schedules.delta_shape import DeltaShape
from tir_schedules.gpu.gated_delta import gated_delta

# Prompts beside a token; sequences of one token, more than have workgroups of their own.
_STEPS = ([Part(4, 5, 5), Part(1, write=0), Part(3, 1, 2), Part(2, 4)], [Part(1, i % 6, -1) for i in range(66)])
# Of prompts: several chunks, from inside of one and up to inside of one; more than have workgroups of their own.
_PROMPTS = ([Part(37, 2, 4), Part(1, write=0), Part(20, write=3), Part(11, 1, 1), Part(12, 5)], _STEPS[1])


@dataclass(frozen=True)
class GatedDelta:
    """All steps."""

    shape: DeltaShape

    def functions(self, knobs: Knobs) -> Mapping[str, tirx.PrimFunc]:
        return {"main": gated_delta(self.shape)}

    def calls(self) -> Sequence[Call]:
        return [self._call(parts) for parts in (_PROMPTS if self.shape.many else _STEPS)]

    def _call(self, parts: list[Part]) -> Call:
        call = delta_call(self.shape, parts)

        def check(found: list[Array]) -> None:
            for index, (expected, bound) in call.expected.items():
                assert_within(found[index].astype("float64"), expected, bound, f"argument {index}")

        return Call(call.args, check)


CASES = {
    "gated delta rule": GatedDelta(DeltaShape(1, 2, 16, 32, "float32")),
    "gated delta rule in float16": GatedDelta(DeltaShape(2, 4, 12, 24, "float16", beta_scale=2.0, tiled=True)),
    "gated delta rule by chunks": GatedDelta(DeltaShape(1, 2, 16, 32, "float32", many=True)),
    "gated delta rule by chunks in float16": GatedDelta(
        DeltaShape(2, 4, 12, 24, "float16", beta_scale=2.0, tiled=True, many=True)
    ),
    "gated delta rule with decays of channels": GatedDelta(DeltaShape(1, 2, 16, 32, "float32", channelwise=True)),
}
