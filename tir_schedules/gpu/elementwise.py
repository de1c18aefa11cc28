"""The rule for all other functions: producers are inlined, and each element has one invocation."""

from __future__ import annotations

from tvm import s_tir, tirx
from tvm.s_tir.schedule import SBlockRV, ScheduleError

from tir_schedules.op import Op
from tir_schedules.rule import Declined, Knobs, NamedRule


def elementwise(func: tirx.PrimFunc, op: Op | None, knobs: Knobs) -> tirx.PrimFunc | Declined:
    """Schedule a function of injective blocks and small reductions."""
    sch = s_tir.Schedule(func.with_attr("global_symbol", "main"))
    root = sch.get_sblock("root")
    for block in sch.get_child_blocks(root):
        _inline(sch, block)
    for block in sch.get_child_blocks(root):
        _bind(sch, block, int(knobs["elementwise_threads"]))
    return sch.mod["main"].without_attr("global_symbol").with_attr("tirx.is_scheduled", True)


def _inline(sch: s_tir.Schedule, block: SBlockRV) -> None:
    """Fold a producer into its consumers where TVM can."""
    try:
        sch.compute_inline(block)
    except ScheduleError:
        return


def _bind(sch: s_tir.Schedule, block: SBlockRV, threads: int) -> None:
    """Bind spatial loops to workgroups and their invocations; reductions are serial inside."""
    loops, kinds = sch.get_loops(block), [it.iter_type for it in sch.get(block).iter_vars]
    spatial = [loop for loop, kind in zip(loops, kinds) if kind == tirx.IterVar.DataPar]
    if len(spatial) < len(loops):
        rest = [loop for loop in loops if loop not in spatial]
        sch.reorder(*spatial, *rest)
    if not spatial:
        spatial = [sch.add_unit_loop(block if not loops else loops[0])]
    fused = sch.fuse(*spatial) if len(spatial) > 1 else spatial[0]
    outer, inner = sch.split(fused, [None, threads])
    sch.bind(outer, "blockIdx.x")
    sch.bind(inner, "threadIdx.x")


RULES = (NamedRule("gpu.elementwise", (), elementwise),)
