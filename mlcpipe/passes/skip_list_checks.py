"""Skips per-call checks of tensor lists that the runtime owns: pages, and adapters.

The virtual machine matches the inputs of a function with their types at every call, except weights (`num_input` of
TVM's VMShapeLower). For three tensors of each of 64 projections that took 576 calls per step (Llama 3.2 1B). Kernels
find the sizes in the tensors.
"""

from __future__ import annotations

import tvm
from tvm import relax, tirx

from mlcpipe.passes.lowering import Lowering


def skip_list_checks(state: Lowering) -> Lowering:
    """Count inputs from the first list on as weights, and bind sizes that only they have to 1, as nothing reads them.

    Runs once the functions consist of nothing but kernel calls.
    """
    mod = tvm.IRModule(dict(state.mod.functions))
    for gv, func in state.mod.functions.items():
        if isinstance(func, relax.Function):
            lists = [i for i, param in enumerate(func.params) if isinstance(param.ty, relax.TupleType)]
            bound = func.bind_symbolic_vars({size: tirx.IntImm("int64", 1) for size in _list_sizes(func)})
            mod[gv] = bound.with_attr("num_input", min(lists, default=len(func.params)))
    return state.with_mod(mod)


def _list_sizes(func: relax.Function) -> list[tirx.Var]:
    """Symbolic sizes of lists that no other input has and the body does not use."""
    used: set[tirx.Var] = set()
    for param in func.params:
        if not isinstance(param.ty, relax.TupleType):
            used.update(relax.analysis.tir_vars_in_type(param.ty))
    for block in func.body.blocks:
        for binding in block.bindings:
            value = binding.value
            for part in value.args if isinstance(value, relax.Call) else [value]:
                if not isinstance(part, (relax.Var, relax.TupleGetItem)):  # their types state sizes without using them
                    used.update(relax.analysis.free_symbolic_vars(part))
    lists = (param.ty for param in func.params if isinstance(param.ty, relax.TupleType))
    return [size for ty in lists for size in relax.analysis.tir_vars_in_type(ty) if size not in used]
