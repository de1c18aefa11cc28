"""The rules for CPUs, in the order in which they are asked. A rule returns a scheduled PrimFunc or `Declined`."""

from __future__ import annotations

from tvm import tirx

from tir_schedules.cpu.attention import attention
from tir_schedules.cpu.elementwise import elementwise
from tir_schedules.cpu.expert_matmul import expert_matmul
from tir_schedules.cpu.int8_expert_matmul import int8_expert_matmul
from tir_schedules.cpu.int8_matmul import int8_matmul
from tir_schedules.cpu.matmul import Tile, matmul
from tir_schedules.cpu.norm import norm
from tir_schedules.op import Op
from tir_schedules.rule import Declined, Knobs, Rules, hand_written
from tir_schedules.step import ATTEND


def _as_written(func: tirx.PrimFunc, op: Op | None, knobs: Knobs) -> tirx.PrimFunc | Declined:
    """The definition is the kernel: one thread, in the order of its loops."""
    return func.with_attr("tirx.is_scheduled", True)


def _tile(knobs: Knobs) -> Tile:
    return Tile(*(int(knobs[f"gemm_{name}"]) for name in ("rows", "blocks", "depth")))


RULES: Rules = (
    ("cpu.int8_matmul", ("matmul", "gated_matmul"), hand_written(lambda _, op, knobs: int8_matmul(op, knobs))),
    ("cpu.matmul", ("matmul", "gated_matmul"), hand_written(lambda _, op, knobs: matmul(op, _tile(knobs)))),
    ("cpu.int8_expert_matmul", ("expert_matmul",), hand_written(lambda _, op, knobs: int8_expert_matmul(op, knobs))),
    ("cpu.expert_matmul", ("expert_matmul",), hand_written(lambda _, op, knobs: expert_matmul(op))),
    ("cpu.norm", ("rms_norm", "add_rms_norm"), hand_written(lambda _, op, knobs: norm(op))),
    ("cpu.attention", ATTEND, hand_written(attention)),
    ("cpu.as_written", ("moe_route",), _as_written),
    ("cpu.elementwise", (), elementwise),
)
