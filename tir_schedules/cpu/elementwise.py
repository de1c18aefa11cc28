"""The rule for everything else on CPUs: producers inlined, rows in parallel where there is work, vectors inside."""

from __future__ import annotations

from collections.abc import Mapping

from tvm import s_tir, tirx
from tvm.s_tir.schedule import SBlockRV, ScheduleError

from tir_schedules.op import Declined, Op

LANES = 16


def elementwise(func: tirx.PrimFunc, op: Op | None, knobs: Mapping[str, int]) -> tirx.PrimFunc | Declined:
    """Schedule a function of injective blocks and simple reductions; never declines, it is the last rule."""
    sch = s_tir.Schedule(func.with_attr("global_symbol", "main"))
    for block in sch.get_child_blocks(sch.get_sblock("root")):
        _inline(sch, block)
    for block in sch.get_child_blocks(sch.get_sblock("root")):
        _vectorize(sch, block)
        _parallel(sch, block, knobs["elementwise_grain"])
    return sch.mod["main"].without_attr("global_symbol").with_attr("tirx.is_scheduled", True)


def _inline(sch: s_tir.Schedule, block: SBlockRV) -> None:
    """Fold a producer into its consumers where TVM can."""
    try:
        sch.compute_inline(block)
    except ScheduleError:
        return


def _vectorize(sch: s_tir.Schedule, block: SBlockRV) -> None:
    """Innermost static spatial loop in vectors of 16 lanes (or as many as divide it)."""
    loops = sch.get_loops(block)
    kinds = [it.iter_type for it in sch.get(block).iter_vars]
    if not loops or any(kind != tirx.IterVar.DataPar for kind in kinds):
        return
    extent = sch.get(loops[-1]).extent
    if not isinstance(extent, tirx.IntImm):
        return
    lanes = next((n for n in (16, 8, 4, 2) if int(extent) % n == 0), 0)
    if lanes:
        _, inner = sch.split(loops[-1], [None, lanes])
        sch.vectorize(inner)


def _parallel(sch: s_tir.Schedule, block: SBlockRV, grain: int) -> None:
    """The outermost loop on all threads, unless the whole nest is static and small."""
    loops = sch.get_loops(block)
    if len(loops) < 2 or sch.get(block).iter_vars[0].iter_type != tirx.IterVar.DataPar:
        return
    total = 1
    for loop in loops:
        extent = sch.get(loop).extent
        if not isinstance(extent, tirx.IntImm):
            total = grain
            break
        total *= int(extent)
    if total >= grain:
        sch.parallel(loops[0])
