"""Short convolutions, and the inputs that they keep."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tvm import tirx

from tests.kernels.cases import short_conv
from tests.kernels.cases.gpu.case import Array, Call, Knobs
from tests.kernels.harness import assert_within
from tir_schedules.conv_shape import ConvShape
from tir_schedules.gpu.short_conv import conv_functions


@dataclass(frozen=True)
class ShortConv:
    """Both functions in all steps."""

    shape: ConvShape

    def functions(self, knobs: Knobs) -> Mapping[str, tirx.PrimFunc]:
        return conv_functions(self.shape)

    def calls(self) -> Sequence[Call]:
        calls = {"short_conv": short_conv.conv_call, "store_conv": short_conv.store_call}
        steps = short_conv.STEPS.values()
        return [self._call(name, call, parts) for name, call in calls.items() for parts in steps]

    def _call(self, function: str, make: Callable[..., short_conv.Call], parts: list[short_conv.Part]) -> Call:
        call = make(self.shape, parts)
        ((index, (expected, bound)),) = call.expected.items()

        def check(found: list[Array]) -> None:
            assert_within(found[index].astype("float64"), expected, bound)

        return Call(call.args, check, function)


CASES = {
    "short convolution": ShortConv(ConvShape(64, 3, "float32")),
    "short convolution of 7 taps in float16": ShortConv(ConvShape(100, 7, "float16")),
}
