"""Adds forwards in which each row may have a low-rank adapter (Hu et al. 2021): y = x W^T + B A x.

The forwards without adapters stay unchanged, so steps without adapters pay nothing. Runs after projections of one
input are joined: one kernel adds the adapters of all parts.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

import tvm
from tvm import relax, tirx

from mlcpipe.errors import TargetError
from mlcpipe.passes.lowering import Adapted, Lowering, Rebuild, is_op, rebuild, weight_params
from mlcpipe.weights.table import Weight
from tir_schedules.adapter_shape import AdapterShape

_LAYER = re.compile(r".*\blayers\.\d+\..*")
_FORWARDS = ("decode", "prefill")


def add_adapters(state: Lowering) -> Lowering:
    """Copy the forwards as `forward_*_adapted`, whose last input is a tuple of the adapters' arrays."""
    if not state.adapters:
        return state
    adapted = _adapted(state)
    indices = {one.name: at for at, one in enumerate(adapted)}
    mod = tvm.IRModule(dict(state.mod.functions))
    inputs: dict[relax.Var, tuple[relax.Var, relax.Var]] = {}  # by a function's first weight: its step and its adapters
    for name in _FORWARDS:
        func = _with_adapters(state.mod[name], adapted, f"{name}_adapted")
        mod[f"{name}_adapted"] = func
        inputs[weight_params(func)[0]] = next(var for var in func.params if var.name == "step"), _last_input(func)
    found: dict[relax.Var, int] = {}
    current: list[tuple[relax.Var, relax.Var]] = []

    def prologue(work: Rebuild, old: list[relax.Var], new: list[relax.Var]) -> None:
        current[:] = [inputs[old[0]]] if old[0] in inputs else []
        names = [weight.name for weight in state.weights]
        found.update({var: indices[name] for var, name in zip(old, names) if name in indices} if current else {})

    def replacement(work: Rebuild, var: relax.Var, value: relax.Expr) -> relax.Expr | None:
        index = _index(work, value, found)
        if index is None:
            return None
        (step, arrays), kernel = current[0], _kernels(state).add_adapters(adapted[index].shape)
        a, b, scale = (work.emit(relax.TupleGetItem(arrays, 3 * index + i)) for i in range(3))
        args = [value.args[0], step, a, b, scale, work.emit(value)]
        kernel_var = work.bb.add_func(kernel, "add_adapters")
        return relax.op.call_tir_inplace(kernel_var, args, [len(args) - 1], value.ty)

    return rebuild(state.with_mod(mod, adapted=adapted), replacement, None, prologue)


def _kernels(state: Lowering) -> Any:
    return importlib.import_module(f"tir_schedules.{state.target.kernels}.adapters")


def _adapted(state: Lowering) -> tuple[Adapted, ...]:
    """The projections of all layers. Raises TargetError if the target has no kernels for them."""
    target = state.target
    if not target.own_pages or target.activation_dtype != "float32":  # else rounding the gate would change bits
        raise TargetError(
            "no adapters for this target", where=target.name, next_step="compile without --adapters",
            expected="activations in float32, and pages of the runtime",
        )  # fmt: skip
    layers = [w for w in state.weights if w.kind == "scheme" and w.experts is None and _LAYER.fullmatch(w.name)]
    few_bits = 0 < state.scheme.bits <= 4 and "uint8" in _kernels(state).DTYPES
    found = tuple(_of_weight(weight, "uint8" if few_bits else state.scheme.model_dtype) for weight in layers)
    odd = next((one for one in found if one.shape.multiple % 16), None)
    if odd is not None:
        raise TargetError(
            f"no adapters of {odd.name}", where=target.name, expected="rows and columns in multiples of 16",
            found=[odd.shape.k, *odd.shape.parts], next_step="compile without --adapters",
        )  # fmt: skip
    return found


def _of_weight(weight: Weight, dtype: str) -> Adapted:
    n, k = weight.shape
    return Adapted(weight.name, AdapterShape(k, weight.part_rows or (n,), dtype), weight.sources[0], weight.order)


def _with_adapters(func: relax.Function, adapted: tuple[Adapted, ...], name: str) -> relax.Function:
    """A copy with the input `adapters`: A, B and `scale` of each projection, with one number of blocks."""
    func = relax.utils.copy_with_new_vars(func)
    count, blocks = int(func.attrs["num_input"]), tirx.Var("blocks", "int64")
    arrays = [kind for one in adapted for kind in one.shape.arrays(blocks).values()]
    kind = relax.TupleType([relax.TensorType(shape, dtype) for shape, dtype in arrays])
    params = [*func.params[:count], relax.Var("adapters", kind), *func.params[count:]]
    made = relax.Function(params, func.body, func.ret_ty, func.is_pure, func.attrs)
    return made.with_attr({"num_input": count + 1, "global_symbol": name})


def _last_input(func: relax.Function) -> relax.Var:
    return func.params[int(func.attrs["num_input"]) - 1]


def _index(work: Rebuild, value: relax.Expr, found: dict[relax.Var, int]) -> int | None:
    """The projection that `value` computes; None for anything else."""
    if not is_op(value, "relax.matmul"):
        return None
    transposed = work.value_of(value.args[1])
    return found.get(transposed.args[0]) if is_op(transposed, "relax.permute_dims") else None
