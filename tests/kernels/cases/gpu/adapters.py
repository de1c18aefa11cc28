"""Low-rank adapters, of rows that have different ones, or none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tvm import tirx

from tests.kernels.cases.adapters import ROWS, adapter_call
from tests.kernels.cases.gpu.case import Array, Call, Knobs
from tests.kernels.harness import assert_within
from tir_schedules.adapter_shape import AdapterShape
from tir_schedules.gpu.adapters import add_adapters


@dataclass(frozen=True)
class Adapters:
    """add_adapters."""

    shape: AdapterShape

    def functions(self, knobs: Knobs) -> Mapping[str, tirx.PrimFunc]:
        return {"main": add_adapters(self.shape)}

    def calls(self) -> Sequence[Call]:
        return [self._call(rows) for rows in ROWS.values()]

    def _call(self, rows: list[tuple[int, int]]) -> Call:
        call = adapter_call(self.shape, rows)
        ((index, (expected, bound)),) = call.expected.items()

        def check(found: list[Array]) -> None:
            assert_within(found[index].astype("float64"), expected, bound)

        return Call(call.args, check)


CASES = {
    "adapters": Adapters(AdapterShape(64, (64,), "float32")),
    "adapters of a joined projection, in float16": Adapters(AdapterShape(208, (96, 16, 16), "float16")),
}
