"""The routing of a mixture of experts, whose definition is the kernel: one thread, in the order of its loops."""

from __future__ import annotations

from tvm import tirx

from tir_schedules.op import Op
from tir_schedules.rule import Declined, Knobs, NamedRule


def moe_route(func: tirx.PrimFunc, op: Op | None, knobs: Knobs) -> tirx.PrimFunc | Declined:
    """The function, as one that has its schedule."""
    return func.with_attr("tirx.is_scheduled", True)


RULES = (NamedRule("cpu.as_written", ("moe_route",), moe_route),)
