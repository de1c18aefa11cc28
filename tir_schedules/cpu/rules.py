"""The rules for CPUs, in the order in which they are asked. A rule returns a scheduled PrimFunc or `Declined`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tvm import tirx

from tir_schedules.cpu.attention import attention
from tir_schedules.cpu.elementwise import elementwise
from tir_schedules.cpu.expert_matmul import expert_matmul
from tir_schedules.cpu.int8_expert_matmul import int8_expert_matmul
from tir_schedules.cpu.int8_matmul import int8_matmul
from tir_schedules.cpu.matmul import Tile, matmul
from tir_schedules.cpu.norm import norm
from tir_schedules.op import Declined, Op, scheduled
from tir_schedules.paged import ATTENTION

Knobs = Mapping[str, int | str]
Rule = Callable[[tirx.PrimFunc, "Op | None", Knobs], "tirx.PrimFunc | Declined"]


def _hand_written(make: Callable[[Op, Knobs], tirx.PrimFunc | Declined]) -> Rule:
    """A rule that puts a hand-written kernel in place of a tagged definition."""

    def rule(func: tirx.PrimFunc, op: Op | None, knobs: Knobs) -> tirx.PrimFunc | Declined:
        if op is None:
            return Declined("not tagged")
        kernel = make(op, knobs)
        return kernel if isinstance(kernel, Declined) else scheduled(kernel, func)

    return rule


def _as_written(func: tirx.PrimFunc, op: Op | None, knobs: Knobs) -> tirx.PrimFunc | Declined:
    """The definition is the kernel: one thread, in the order of its loops."""
    return func.with_attr("tirx.is_scheduled", True)


def _attention(func: tirx.PrimFunc, op: Op | None, knobs: Knobs) -> tirx.PrimFunc | Declined:
    return Declined("not tagged") if op is None else scheduled(attention(func, op, knobs), func)


def _tile(knobs: Knobs) -> Tile:
    return Tile(*(int(knobs[f"gemm_{name}"]) for name in ("rows", "blocks", "depth")))


# Name, the operations that it is for (none: any), rule.
RULES: tuple[tuple[str, tuple[str, ...], Rule], ...] = (
    ("cpu.int8_matmul", ("matmul", "gated_matmul"), _hand_written(int8_matmul)),
    ("cpu.matmul", ("matmul", "gated_matmul"), _hand_written(lambda op, knobs: matmul(op, _tile(knobs)))),
    ("cpu.int8_expert_matmul", ("expert_matmul",), _hand_written(int8_expert_matmul)),
    ("cpu.expert_matmul", ("expert_matmul",), _hand_written(lambda op, knobs: expert_matmul(op))),
    ("cpu.norm", ("rms_norm", "add_rms_norm"), _hand_written(lambda op, knobs: norm(op))),
    ("cpu.attention", ATTENTION, _attention),
    ("cpu.as_written", ("moe_route",), _as_written),
    ("cpu.elementwise", (), elementwise),
)
