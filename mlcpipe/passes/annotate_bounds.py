"""Gives static memory planning the largest value of each symbolic size."""

from __future__ import annotations

import tvm
from tvm import relax

from mlcpipe.passes.lowering import Lowering


def annotate_bounds(state: Lowering) -> Lowering:
    """Put `state.bounds` (variable name -> value) on every function, where StaticPlanBlockMemory looks for them."""
    mod = tvm.IRModule(dict(state.mod.functions))
    for gv, func in state.mod.functions.items():
        if isinstance(func, relax.Function):
            mod[gv] = func.with_attr("tir_var_upper_bound", dict(state.bounds))
    return state.with_mod(mod)
