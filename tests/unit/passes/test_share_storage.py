"""Storages planned by size: smaller, and nothing is read after its memory was given to something else."""

from __future__ import annotations

from typing import Any

import pytest
import tvm
from tvm import relax

from mlcpipe.passes.lowering import Lowering, workspace_bytes
from mlcpipe.passes.share_storage import share_storage
from tests.unit.passes.small import CHUNK, CONFIG, forwards, passes_through, small_llama

BEFORE = passes_through("StaticPlanBlockMemory")


@pytest.fixture(scope="module")
def planned() -> Lowering:
    """A llama as TVM's planner leaves it."""
    return small_llama(BEFORE)


def calls(binding: relax.Binding, *names: str) -> bool:
    value = binding.value
    return isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.Op) and value.op.name in names


def stale_reads(func: relax.Function) -> list[str]:
    """Reads of a tensor whose storage holds another one by then: [] where the plan is right."""
    current: dict[relax.Var, relax.Var] = {}  # storage -> the tensor that it holds
    storage_of: dict[relax.Var, relax.Var] = {}
    same: dict[relax.Var, Any] = {}  # variable -> the tensor, or the list of tensors, that it is

    def tensors(expr: relax.Expr) -> list[relax.Var]:
        found = same.get(expr, expr) if isinstance(expr, relax.Var) else expr
        if isinstance(found, relax.Tuple):
            return [one for field in found.fields for one in tensors(field)]
        return [found] if isinstance(found, relax.Var) and found in storage_of else []

    def check(*read: relax.Expr) -> None:
        bad.extend(str(t) for expr in read for t in tensors(expr) if not current[storage_of[t]].same_as(t))

    bad: list[str] = []
    for binding in func.body.blocks[0].bindings:
        var, value = binding.var, binding.value
        if calls(binding, "relax.memory.alloc_tensor"):
            storage_of[var], current[value.args[0]] = value.args[0], var
        elif isinstance(value, relax.Var | relax.Tuple):
            same[var] = same.get(value, value) if isinstance(value, relax.Var) else value
        elif isinstance(value, relax.TupleGetItem):
            whole = same.get(value.tuple_value)
            if isinstance(whole, relax.Tuple):
                field = whole.fields[value.index]
                same[var] = same.get(field, field)
        elif calls(binding, "relax.reshape", "relax.memory.view"):
            same[var] = same.get(value.args[0], value.args[0])
        elif isinstance(value, relax.Call):
            check(*value.args)
    check(func.body.body)
    return bad


def test_the_plan_is_smaller_and_right(planned: Lowering) -> None:
    state = share_storage(planned)
    relax.analysis.well_formed(state.mod)
    before, after = workspace_bytes(planned.mod), workspace_bytes(state.mod)
    assert after.keys() == before.keys() and all(after[name] <= before[name] for name in after)
    assert after["prefill"] < 0.9 * before["prefill"]
    # the gated projection beside the residual: no plan is below that
    assert after["prefill"] >= 4 * CHUNK * (CONFIG["intermediate_size"] + CONFIG["hidden_size"])
    for name, func in forwards(state).items():
        assert stale_reads(func) == [], name


def test_the_check_sees_a_wrong_plan(planned: Lowering) -> None:
    """All tensors of a function in one storage."""
    func = forwards(planned)["decode"]
    first = next(b.var for b in func.body.blocks[0].bindings if calls(b, "relax.memory.alloc_storage"))
    bindings = []
    for binding in func.body.blocks[0].bindings:
        if calls(binding, "relax.memory.alloc_tensor"):
            call = binding.value
            binding = relax.VarBinding(binding.var, relax.Call(call.op, [first, *call.args[1:]], call.attrs))
        bindings.append(binding)
    body = relax.SeqExpr([relax.BindingBlock(bindings)], func.body.body)
    assert stale_reads(relax.Function(func.params, body, func.ret_ty, func.is_pure, func.attrs))
