"""Every PrimFunc gets a schedule from `tir_schedules/<target.kernels>`, and the report says which rule and why.

This is where variants part: rules see the knobs of the state's variant, with those of tuning records in their place.
"""

from __future__ import annotations

import tvm
from tvm import tirx

from mlcpipe.passes.lowering import BY_HAND, KernelReport, Lowering
from mlcpipe.tuning.kernels import kernel_hash, ruled, rules_of, spaces_of
from tir_schedules.op import Declined, Op, op_of


def schedule_kernels(state: Lowering) -> Lowering:
    """Ask the target's rules in order; the first that does not decline schedules the function."""
    rules = rules_of(state.target)
    mod = tvm.IRModule(dict(state.mod.functions))
    reports = []
    for gv, func in state.mod.functions.items():
        if not isinstance(func, tirx.PrimFunc):
            continue
        op = op_of(func)
        kind = op.kind if op is not None else "fused"
        by_hand = func.attrs is not None and "tirx.is_scheduled" in func.attrs
        if by_hand and not any(kind in kinds for _, kinds, _ in rules):
            reports.append(KernelReport(gv.name_hint, kind, BY_HAND, "written with its schedule"))
            continue
        said = []
        for name, kinds, rule in rules:
            if kind not in kinds if kinds else by_hand:
                continue
            result = rule(func, op, state.variant.schedule)
            if isinstance(result, Declined):
                said.append(f"{name}: {result.reason}")
                continue
            records: tuple[str, ...] = ()
            if op is not None and state.tuned.records:
                result, records, ignored = _with_records(state, name, func, op, result)
                said += ignored
            mod[gv] = result
            reason = "; ".join(said) or ("made for it" if kinds else f"no rule of its own for {kind}")
            reports.append(KernelReport(gv.name_hint, kind, name, reason, records))
            break
        else:
            reports.append(KernelReport(gv.name_hint, kind, BY_HAND, "; ".join(said)))
    return state.with_mod(mod, kernels=tuple(sorted(reports, key=lambda r: r.name)))


def _with_records(
    state: Lowering, rule: str, func: tirx.PrimFunc, op: Op, plain: tirx.PrimFunc
) -> tuple[tirx.PrimFunc, tuple[str, ...], list[str]]:
    """What the rule makes with the knobs of records -> it, the records that it used, why others were ignored."""
    knobs = state.variant.schedule
    found = state.tuned.of(kernel_hash(func, op), rule, state.variant.name)
    spaces = {space.bucket: space for space in spaces_of(state.target, rule, op, knobs)} if found else {}
    chosen: dict[str, int] = {}
    used, ignored = [], []
    for record in found:
        space = spaces.get(record.bucket)
        problem = f"the kernel has no range {record.bucket}" if space is None else space.check(record.knobs)
        if problem:
            ignored.append(f"record for {record.bucket} ignored: {problem}")
            continue
        chosen |= record.knobs
        used.append(record.title)
    if not used:
        return plain, (), ignored
    result = ruled(state.target, rule, func, {**knobs, **chosen})
    if isinstance(result, Declined):
        return plain, (), [*ignored, f"records ignored: {result.reason}"]
    return result, tuple(used), ignored
