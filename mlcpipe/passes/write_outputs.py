"""Lets model functions write their result to a buffer of the caller.

Results that a function allocates come from a pool of the virtual machine that keeps memory by exact size: logits of
every number of rows would add up to a gigabyte.
"""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.relax.expr import _update_type

from mlcpipe.passes.lowering import Lowering, is_op

OUTPUTS = ("logits", "embeddings", "handed")


def write_outputs(state: Lowering) -> Lowering:
    """In functions with a parameter of `OUTPUTS`, the kernel of the result writes to it."""
    mod = tvm.IRModule(dict(state.mod.functions))
    for gv, func in state.mod.functions.items():
        if isinstance(func, relax.Function):
            output = next((param for param in func.params if param.name in OUTPUTS), None)
            if output is not None:
                mod[gv] = _written_to(func, output)
    return state.with_mod(mod)


def _written_to(func: relax.Function, output: relax.Var) -> relax.Function:
    """The function with its result in `output`."""
    (block,), result = func.body.blocks, func.body.body
    values = {binding.var: binding.value for binding in block.bindings}
    while not is_op(values[result], "relax.call_tir"):  # the result may be an alias of the kernel's
        result = values[result]
    bindings = []
    for binding in block.bindings:
        if binding.var.same_as(result):
            call = binding.value
            kernel, args = call.args[0], [*call.args[1].fields, output]
            value = relax.op.call_tir_inplace(kernel, args, [len(args) - 1], call.ty_args[0])
            _update_type(value, call.ty)
            binding = relax.VarBinding(binding.var, value)
        bindings.append(binding)
    body = relax.SeqExpr([type(block)(bindings)], func.body.body)
    _update_type(body, func.body.ty)
    return relax.Function(func.params, body, func.ret_ty, func.is_pure, func.attrs)
