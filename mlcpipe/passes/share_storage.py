"""Shares storages among tensors that are never live together, the largest tensors first.

StaticPlanBlockMemory assigns storages in program order and lets them grow, so a storage for a small tensor may end as
large as the largest. Assigning tensors by size instead is the greedy planner of Pisarchyk and Lee (2020), "Efficient
Memory Management for Deep Neural Net Inference", section 4.3. Every tensor starts at the beginning of its storage:
kernels take no offsets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import tvm
from tvm import relax, tirx
from tvm.relax.expr import _update_type

from mlcpipe.passes.lowering import Lowering, with_bindings

_STORAGE, _TENSOR = "relax.memory.alloc_storage", "relax.memory.alloc_tensor"


@dataclass
class _Tensor:
    """An allocation of at most `nbytes`, live from binding `first` to `last`, planned into `storage`."""

    first: int
    last: int
    nbytes: int
    storage: relax.Call

    def overlaps(self, other: _Tensor) -> bool:
        """Whether both are live at some binding."""
        return self.first <= other.last and other.first <= self.last

    def fits(self, others: list[_Tensor]) -> bool:
        """Whether it can share a storage with `others`: same device and scope, disjoint lifetimes."""
        device = (int(self.storage.args[1].value), str(self.storage.args[2].value))
        other_device = (int(others[0].storage.args[1].value), str(others[0].storage.args[2].value))
        return device == other_device and not any(map(self.overlaps, others))


def share_storage(state: Lowering) -> Lowering:
    """Plan the storages of every function again, and keep the smaller plan."""
    mod = tvm.IRModule(dict(state.mod.functions))
    for gv, func in state.mod.functions.items():
        if isinstance(func, relax.Function) and len(func.body.blocks) == 1:
            mod[gv] = _planned(func, state.bounds)
    return state.with_mod(mod)


def _planned(func: relax.Function, bounds: Mapping[str, int]) -> relax.Function:
    bindings = list(func.body.blocks[0].bindings)
    tensors = _tensors(bindings, func.body.body, bounds)
    shared: list[list[_Tensor]] = []
    for tensor in sorted(tensors.values(), key=lambda t: (-t.nbytes, t.first)):
        group = next((members for members in shared if tensor.fits(members)), None)
        if group is None:
            shared.append([tensor])
        else:
            group.append(tensor)
    before = sum(int(b.value.args[0].values[0]) for b in bindings if _calls(b, _STORAGE))
    if not tensors or sum(group[0].nbytes for group in shared) >= before:
        return func
    return _rewritten(func, bindings, tensors, shared)


def _tensors(bindings: list[relax.Binding], result: relax.Expr, bounds: Mapping[str, int]) -> dict[int, _Tensor]:
    """Index of a binding -> the tensor that it allocates in a storage."""
    storages: dict[relax.Var, relax.Call] = {}
    tensors: dict[int, _Tensor] = {}
    holds: dict[relax.Var, set[int]] = {}  # variable -> tensors whose memory it may use
    tuples: dict[relax.Var, relax.Tuple] = {}
    for index, binding in enumerate(bindings):
        value = binding.value
        if isinstance(value, relax.Tuple):
            tuples[binding.var] = value
        elif isinstance(value, relax.TupleGetItem) and value.tuple_value in tuples:
            value = tuples[value.tuple_value].fields[value.index]  # and not the other fields
        read = {owner for var in relax.analysis.free_vars(value) for owner in holds.get(var, ())}
        for owner in read:
            tensors[owner].last = index
        if _calls(binding, _STORAGE):
            storages[binding.var] = binding.value
        elif _calls(binding, _TENSOR):
            storage, offset, shape, dtype = binding.value.args[:4]
            assert int(offset.value) == 0  # StaticPlanBlockMemory emits no other
            nbytes = _nbytes(shape, str(dtype.value), bounds)
            tensors[index] = _Tensor(index, index, nbytes, storages[storage])
            holds[binding.var] = {index}
        elif read and not _empty(binding.var):
            holds[binding.var] = read  # a view, a tuple, or something unknown
    for var in relax.analysis.free_vars(result):
        for owner in holds.get(var, ()):
            tensors[owner].last = len(bindings)
    return tensors


def _rewritten(
    func: relax.Function, bindings: list[relax.Binding], tensors: dict[int, _Tensor], shared: list[list[_Tensor]]
) -> relax.Function:
    """The function with a storage for each list of `shared`, allocated at its first tensor."""
    at = {min(t.first for t in group): number for number, group in enumerate(shared)}
    number_of = {t.first: number for number, group in enumerate(shared) for t in group}
    storages = {number: relax.Var(f"shared{number}", relax.AnyType()) for number in range(len(shared))}
    done: list[relax.Binding] = []
    for index, binding in enumerate(bindings):
        if _calls(binding, _STORAGE):
            continue
        if index in at:
            largest = shared[at[index]][0]
            size = relax.ShapeExpr([largest.nbytes])
            allocation = _with_args(largest.storage, [size, *largest.storage.args[1:]])
            done.append(relax.VarBinding(storages[at[index]], allocation))
        if index in tensors:
            args = [storages[number_of[index]], *binding.value.args[1:]]
            binding = relax.VarBinding(binding.var, _with_args(binding.value, args))
        done.append(binding)
    return with_bindings(func, done, func.body.body)


def _with_args(call: relax.Call, args: list[relax.Expr]) -> relax.Call:
    """The call with other arguments, and a result of the same type."""
    new_call = relax.Call(call.op, args, call.attrs, call.ty_args)
    _update_type(new_call, call.ty)
    return new_call


def _calls(binding: relax.Binding, name: str) -> bool:
    value = binding.value
    return isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.Op) and value.op.name == name


def _empty(var: relax.Var) -> bool:
    """Whether it is the result of a kernel that writes to its arguments."""
    return isinstance(var.ty, relax.TupleType) and not var.ty.fields


def _nbytes(shape: relax.ShapeExpr, dtype: str, bounds: Mapping[str, int]) -> int:
    """The maximum bytes of a tensor with a symbolic shape."""
    analyzer = tvm.sym.Analyzer()
    for var in tirx.analysis.undefined_vars(tirx.Evaluate(sum(shape.values, tirx.const(0, "int64")))):
        analyzer.update(var, tvm.sym.ConstIntBound(0, bounds[var.name]))
    count = 1
    for size in shape.values:
        count *= int(analyzer.const_int_bound(size).max_value)
    element = tvm.DataType(dtype)
    bits = int(element.bits) * int(element.lanes)
    return (count * bits + 7) // 8
