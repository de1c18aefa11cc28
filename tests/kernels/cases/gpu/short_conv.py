"""Short convolutions, and the inputs that they keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tvm import tirx

from tests.kernels.cases.gpu.case import Array, Call, Knobs
from tests.kernels.cases.short_conv import STEPS, Part, conv_call
from tests.kernels.harness import assert_within
from tir_schedules.conv_shape import ConvShape
from tir_schedules.gpu.short_conv import short_conv


@dataclass(frozen=True)
class ShortConv:
    """All steps."""

    shape: ConvShape

    def functions(self, knobs: Knobs) -> Mapping[str, tirx.PrimFunc]:
        return {"main": short_conv(self.shape)}

    def calls(self) -> Sequence[Call]:
        return [self._call(parts) for parts in STEPS.values()]

    def _call(self, parts: list[Part]) -> Call:
        call = conv_call(self.shape, parts)

        def check(found: list[Array]) -> None:
            for index, (expected, bound) in call.expected.items():
                assert_within(found[index].astype("float64"), expected, bound, f"argument {index}")

        return Call(call.args, check)


CASES = {
    "short convolution": ShortConv(ConvShape(64, 3, "float32", bias=True, activation="silu")),
    "short convolution of 7 taps in float16": ShortConv(ConvShape(100, 7, "float16")),
}
