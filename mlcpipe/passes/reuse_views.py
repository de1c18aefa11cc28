"""Shares one tensor among views of the same place, shape and dtype, so that the virtual machine makes each once.

After memory planning all layers of a model place their tensors alike. Making each view again (a shape, a view of the
storage and its release) took 4 to 6 % of a decode step of 32 narrow layers. No view owns a storage; storages live until
the function returns.
"""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import relax

from mlcpipe.passes.lowering import Lowering, Substitute, is_op, with_bindings

_VIEWS = ("relax.memory.alloc_tensor", "relax.reshape")


def reuse_views(state: Lowering) -> Lowering:
    """Replace each view of a storage or a tensor by the first one like it, and tuples by their fields."""
    mod = tvm.IRModule(dict(state.mod.functions))
    for gv, func in state.mod.functions.items():
        if isinstance(func, relax.Function) and len(func.body.blocks) == 1:
            mod[gv] = _reused(func)
    return state.with_mod(mod)


def _reused(func: relax.Function) -> relax.Function:
    values: dict[relax.Var, relax.Expr] = {}
    views: dict[relax.Expr, list[relax.VarBinding]] = {}
    tuples: dict[relax.Var, relax.VarBinding] = {}
    substitute, done = Substitute(values), []
    for binding in func.body.blocks[0].bindings:
        var, value = binding.var, substitute.visit_expr(binding.value)
        if isinstance(binding, relax.MatchCast):
            done.append(binding)
            continue
        if isinstance(value, relax.TupleGetItem) and value.tuple_value in tuples:
            value = tuples[value.tuple_value].value.fields[value.index]
        known = value if isinstance(value, relax.Var) else _known(value, views)
        if known is not None:
            values[var] = known
            continue
        done.append(relax.VarBinding(var, value))
        if isinstance(value, relax.Tuple):
            tuples[var] = done[-1]
        elif _is_view(value):
            views.setdefault(value.args[0], []).append(done[-1])
    result = substitute.visit_expr(func.body.body)
    used = {var for expr in (result, *(binding.value for binding in done)) for var in relax.analysis.free_vars(expr)}
    done = [binding for binding in done if binding.var in used or binding.var not in tuples]
    return with_bindings(func, done, result)


def _is_view(value: relax.Expr) -> bool:
    return any(is_op(value, name) for name in _VIEWS)


def _known(value: relax.Expr, views: dict[relax.Expr, list[relax.VarBinding]]) -> relax.Var | None:
    """The first variable of an equal view."""
    alike = views.get(value.args[0], ()) if _is_view(value) else ()
    return next((one.var for one in alike if tvm_ffi.structural_equal(one.value, value)), None)
