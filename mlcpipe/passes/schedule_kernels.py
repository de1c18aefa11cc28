"""Schedules every PrimFunc with `tir_schedules/<target.kernels>`, and reports which rule and why.

Variants diverge here: rules get the knobs of the state's variant, overridden by tuning records.
"""

from __future__ import annotations

import tvm
from tvm import tirx

from mlcpipe.passes.lowering import BY_HAND, KernelReport, Lowering
from mlcpipe.tuned.kernels import apply_rule, kernel_hash, rules_of, spaces_of
from tir_schedules.op import Op, op_of
from tir_schedules.rule import Declined, Knobs, Rules


def first_rule(rules: Rules, func: tirx.PrimFunc, knobs: Knobs) -> tuple[str, tirx.PrimFunc, str]:
    """The first rule that accepts a function, its kernel, and the reason for this rule.

    `BY_HAND` and the function itself if none does. Rules for any kind are not for functions with a schedule.
    """
    op = op_of(func)
    kind = op.kind if op is not None else "fused"
    by_hand = func.attrs is not None and "tirx.is_scheduled" in func.attrs
    notes: list[str] = []
    for one in rules:
        if kind not in one.kinds if one.kinds else by_hand:
            continue
        result = one.rule(func, op, knobs)
        if not isinstance(result, Declined):
            usual = "made for this operation" if one.kinds else f"no rule for {kind}"
            return one.name, result, "; ".join(notes) or usual
        notes.append(f"{one.name}: {result.reason}")
    return BY_HAND, func, "; ".join(notes) or "written with its schedule"


def schedule_kernels(state: Lowering) -> Lowering:
    """Ask the target's rules in order; the first that does not decline schedules the function."""
    rules = rules_of(state.target)
    mod = tvm.IRModule(dict(state.mod.functions))
    reports = []
    for gv, func in state.mod.functions.items():
        if not isinstance(func, tirx.PrimFunc):
            continue
        op = op_of(func)
        records: tuple[str, ...] = ()
        name, mod[gv], reason = first_rule(rules, func, state.variant.schedule)
        if op is not None and state.tuned.records and name != BY_HAND:
            mod[gv], records, ignored = _with_records(state, name, func, op, mod[gv])
            reason = "; ".join((reason, *ignored))
        reports.append(KernelReport(gv.name_hint, op.kind if op is not None else "fused", name, reason, records))
    return state.with_mod(mod, kernels=tuple(sorted(reports, key=lambda r: r.name)))


def _with_records(
    state: Lowering, rule: str, func: tirx.PrimFunc, op: Op, plain: tirx.PrimFunc
) -> tuple[tirx.PrimFunc, tuple[str, ...], list[str]]:
    """Apply the rule with recorded knobs -> kernel, records used, why others were ignored."""
    knobs = state.variant.schedule
    records = state.tuned.of(kernel_hash(func, op), rule, state.variant.name)
    spaces = {space.bucket: space for space in spaces_of(state.target, rule, op, knobs)} if records else {}
    chosen: dict[str, int] = {}
    used, ignored = [], []
    for record in records:
        space = spaces.get(record.bucket)
        problem = f"the kernel has no range {record.bucket}" if space is None else space.check(record.knobs)
        if problem:
            ignored.append(f"record for {record.bucket} ignored: {problem}")
            continue
        chosen |= record.knobs
        used.append(record.title)
    if not used:
        return plain, (), ignored
    result = apply_rule(state.target, rule, func, {**knobs, **chosen})
    if isinstance(result, Declined):
        return plain, (), [*ignored, f"records ignored: {result.reason}"]
    return result, tuple(used), ignored
