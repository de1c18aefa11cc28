"""The rule for everything else on CPUs: producers inlined, rows in parallel where there is work, vectors inside."""

from __future__ import annotations

import tvm
from tvm import s_tir, tirx
from tvm.s_tir.schedule import SBlockRV, ScheduleError

from tir_schedules.op import Op
from tir_schedules.rule import Declined, Knobs, NamedRule


def elementwise(func: tirx.PrimFunc, op: Op | None, knobs: Knobs) -> tirx.PrimFunc | Declined:
    """Schedule a function of injective blocks and simple reductions; never declines, it is the last rule."""
    sch = s_tir.Schedule(func.with_attr("global_symbol", "main"))
    for block in sch.get_child_blocks(sch.get_sblock("root")):
        _inline(sch, block)
    for block in sch.get_child_blocks(sch.get_sblock("root")):
        _vectorize(sch, block)
    serial = sch.mod["main"]
    work = max((_work(sch, block) for block in sch.get_child_blocks(sch.get_sblock("root"))), key=_as_bound)
    for block in sch.get_child_blocks(sch.get_sblock("root")):
        _parallel(sch, block)
    chosen = _choose(serial, sch.mod["main"], work, int(knobs["elementwise_grain"]))
    return chosen.without_attr("global_symbol").with_attr("tirx.is_scheduled", True)


def _inline(sch: s_tir.Schedule, block: SBlockRV) -> None:
    """Fold a producer into its consumers where TVM can."""
    try:
        sch.compute_inline(block)
    except ScheduleError:
        return


def _vectorize(sch: s_tir.Schedule, block: SBlockRV) -> None:
    """Vectorize the innermost static spatial loop by 16 lanes, or by the most that divide it."""
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


def _work(sch: s_tir.Schedule, block: SBlockRV) -> tirx.PrimExpr:
    """Iterations of a block: the product of its loops, a number or an expression of symbolic sizes."""
    total: tirx.PrimExpr = tirx.const(1, "int64")
    for loop in sch.get_loops(block):
        total = total * sch.get(loop).extent.astype("int64")
    return total


def _as_bound(work: tirx.PrimExpr) -> float:
    """Order of work: symbolic is more than any number."""
    return float(int(work)) if isinstance(work, tirx.IntImm) else float("inf")


def _parallel(sch: s_tir.Schedule, block: SBlockRV) -> None:
    """The outermost loop on all threads, where it is spatial and not the vector itself."""
    loops = sch.get_loops(block)
    if len(loops) > 1 and sch.get(block).iter_vars[0].iter_type == tirx.IterVar.DataPar:
        sch.parallel(loops[0])


def _choose(serial: tirx.PrimFunc, parallel: tirx.PrimFunc, work: tirx.PrimExpr, grain: int) -> tirx.PrimFunc:
    """One function that takes the serial body up to `grain` iterations, and the parallel one above.

    Waking threads for one token costs more than the work, and a second process on the machine makes it worse.
    """
    if isinstance(work, tirx.IntImm):
        return serial if int(work) <= grain else parallel
    root = serial.body.block
    both = tirx.IfThenElse(work <= tirx.const(grain, "int64"), root.body, parallel.body.block.body)
    block = type(root)([], root.reads, root.writes, root.name_hint, both, None, root.alloc_buffers)
    func = serial.with_body(type(serial.body)([], True, block))
    return tirx.transform.ConvertSSA()(tvm.IRModule({"main": func}))["main"]


RULES = (NamedRule("cpu.elementwise", (), elementwise),)
