"""Every PrimFunc gets a schedule from `tir_schedules/<target.kernels>`, and the report says which rule and why.

This is where variants part: rules see the knobs of the state's variant.
"""

from __future__ import annotations

import importlib

import tvm
from tvm import tirx

from mlcpipe.passes.lowering import BY_HAND, KernelReport, Lowering
from tir_schedules.op import Declined, op_of


def schedule_kernels(state: Lowering) -> Lowering:
    """Ask the target's rules in order; the first that does not decline schedules the function."""
    rules = importlib.import_module(f"tir_schedules.{state.target.kernels}.rules").RULES
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
        declined = []
        for name, kinds, rule in rules:
            if kind not in kinds if kinds else by_hand:
                continue
            result = rule(func, op, state.variant.schedule)
            if isinstance(result, Declined):
                declined.append(f"{name}: {result.reason}")
                continue
            mod[gv] = result
            reports.append(
                KernelReport(
                    gv.name_hint,
                    kind,
                    name,
                    "; ".join(declined) or ("made for it" if kinds else f"no rule of its own for {kind}"),
                )
            )
            break
        else:
            reports.append(KernelReport(gv.name_hint, kind, BY_HAND, "; ".join(declined)))
    return state.with_mod(mod, kernels=tuple(sorted(reports, key=lambda r: r.name)))
