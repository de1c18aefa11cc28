"""What static memory planning needs, and what it found: bounds of symbolic sizes, weights as one tuple, the plan."""

from __future__ import annotations

import tvm
from tvm import relax

from mlcpipe.errors import TargetError
from mlcpipe.passes.lowering import Lowering

# Those that hosts call with as many tokens as the plan allows for.
_STEPS = ("embed", "prefill", "decode")


def state_bounds(state: Lowering) -> Lowering:
    """Tell the planner the largest value of each symbolic size (`bounds`: variable name -> value)."""
    mod = tvm.IRModule(dict(state.mod.functions))
    for gv, func in state.mod.functions.items():
        if isinstance(func, relax.Function):
            mod[gv] = func.with_attr("tir_var_upper_bound", dict(state.bounds))
    return state.with_mod(mod)


def bundle_weights(state: Lowering) -> Lowering:
    """Model functions take their weights as one tuple, the last argument."""
    mod = tvm.IRModule(dict(state.mod.functions))
    for gv, func in state.mod.functions.items():
        if isinstance(func, relax.Function) and len(func.params) == int(func.attrs["num_input"]):
            mod[gv] = func.without_attr("num_input")
    return state.with_mod(relax.transform.BundleModelParams("packed_params")(mod))


def workspace_bytes(mod: tvm.IRModule) -> dict[str, int]:
    """Function -> bytes of the storages that StaticPlanBlockMemory gave it, at the stated bounds."""
    plan: dict[str, int] = {}
    for gv, func in mod.functions.items():
        if isinstance(func, relax.Function):
            plan[gv.name_hint] = sum(_storage_bytes(b.value) for block in func.body.blocks for b in block.bindings)
    return plan


def check_bindings(state: Lowering) -> Lowering:
    """Refuse a plan with a storage that the device cannot bind. Raises TargetError."""
    limit = state.target.limits.get("max_binding_bytes")
    for gv, func in state.mod.functions.items():
        if limit is None or gv.name_hint not in _STEPS or not isinstance(func, relax.Function):
            continue
        largest = max((_storage_bytes(b.value) for block in func.body.blocks for b in block.bindings), default=0)
        if largest > limit:
            raise TargetError(
                f"the workspace of {gv.name_hint} does not fit a binding",
                where=state.target.name,
                expected=f"{limit:,} bytes or less",
                found=f"{largest:,} bytes",
                next_step="lower limits.max_prefill_chunk in a target file of your own",
            )
    return state


def _storage_bytes(value: relax.Expr) -> int:
    if not isinstance(value, relax.Call) or not isinstance(value.op, tvm.ir.Op):
        return 0
    if value.op.name not in ("relax.memory.alloc_storage", "relax.vm.alloc_storage"):
        return 0
    size = value.args[0].values[0]
    return int(size) if isinstance(size, int | tvm.tirx.IntImm) else 0
