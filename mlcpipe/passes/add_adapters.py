"""Adds forwards in which each row may have a low-rank adapter (Hu et al. 2021): y = x W^T + B A x.

The forwards without adapters stay unchanged, so steps without adapters pay nothing. Runs after projections of one
input are joined: one kernel adds the adapters of all parts.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

import tvm
from tvm import relax, te, tirx

from mlcpipe.errors import TargetError
from mlcpipe.passes.lowering import Adapted, Lowering, Rebuild, is_op, rebuild, weight_params
from mlcpipe.weights.table import Weight
from tir_schedules import step_layout as layout
from tir_schedules.adapter_shape import AdapterShape
from tir_schedules.op import tag

_LAYER = re.compile(r".*\blayers\.\d+\..*")
_FORWARDS = ("decode", "prefill")


def add_adapters(state: Lowering) -> Lowering:
    """Copy the forwards as `forward_*_adapted`, whose last input is a tuple of the adapters' arrays."""
    if not state.adapters:
        return state
    adapted = _adapted(state)
    indices = {one.name: at for at, one in enumerate(adapted)}
    mod = tvm.IRModule(dict(state.mod.functions))
    inputs: dict[
        relax.Var, list[relax.Var]
    ] = {}  # by a function's first weight: its step, its adapters, rows of logits
    for name in _FORWARDS:
        func = _with_adapters(state.mod[name], adapted, f"{name}_adapted")
        mod[f"{name}_adapted"] = func
        named = {var.name: var for var in func.params}
        rows = [named["rows"]] if "rows" in named else []
        inputs[weight_params(func)[0]] = [named["step"], _last_input(func), *rows]
    found: dict[relax.Var, int] = {}
    current: list[relax.Var] = []  # of the function, and the step of its rows of logits once that is made

    def prologue(work: Rebuild, old: list[relax.Var], new: list[relax.Var]) -> None:
        current[:] = inputs.get(old[0], [])
        names = [weight.name for weight in state.weights]
        found.update({var: indices[name] for var, name in zip(old, names) if name in indices} if current else {})

    def replacement(work: Rebuild, var: relax.Var, value: relax.Expr) -> relax.Expr | None:
        index = _index(work, value, found)
        if index is None:
            return None
        (step, arrays, *narrowed), kernel = current, _kernels(state).add_adapters(adapted[index].shape)
        if narrowed and value.args[0].ty.shape[0].same_as(narrowed[0].ty.shape[0]):
            if len(narrowed) == 1:
                current.append(_step_of_rows(work, step, narrowed[0]))
            step = current[-1]
        a, b, scale = (work.emit(relax.TupleGetItem(arrays, 3 * index + i)) for i in range(3))
        args = [value.args[0], step, a, b, scale, work.emit(value)]
        kernel_var = work.bb.add_func(kernel, "add_adapters")
        return relax.op.call_tir_inplace(kernel_var, args, [len(args) - 1], value.ty)

    return rebuild(state.with_mod(mod, adapted=adapted), replacement, None, prologue)


def _step_of_rows(work: Rebuild, step: relax.Var, rows: relax.Var) -> relax.Var:
    """What kernels of adapters read of a step, for some of its rows."""
    integers = te.placeholder(tuple(step.ty.shape), "int32", name="step")
    picked = te.placeholder(tuple(rows.ty.shape), "int32", name="rows")
    count = picked.shape[0]

    def integer(i: tirx.Var) -> tirx.PrimExpr:
        value = integers[tirx.min(i, layout.HEADER - 1)]
        for at, field in enumerate((layout.ADAPTER_BEGIN, layout.ADAPTER_END)):
            begin = layout.HEADER + at * count
            value = tirx.if_then_else(i == field, begin.astype("int32"), value)
            row = picked[tirx.max(tirx.min(i - begin, count - 1), 0)]
            own = integers[(integers[field] + row).astype("int64")]
            value = tirx.if_then_else(tirx.all(i >= begin, i < begin + count), own, value)
        return value

    of_rows = te.compute((layout.HEADER + 2 * count,), integer, name="step_of_rows")
    func = tag(te.create_prim_func([integers, picked, of_rows]), "step_of_rows")
    out = relax.TensorType((layout.HEADER + 2 * count,), "int32")
    return work.emit(work.call_tir(func, "step_of_rows", [step, rows], out))


def _kernels(state: Lowering) -> Any:
    return importlib.import_module(f"tir_schedules.{state.target.kernels}.adapters")


def _adapted(state: Lowering) -> tuple[Adapted, ...]:
    """The projections of all layers. Raises TargetError if the target has no kernels for them."""
    target = state.target
    if target.in_browsers or target.activation_dtype != "float32":  # else rounding the gate would change bits
        raise TargetError(
            "no adapters for this target", where=target.name, next_step="compile without --adapters",
            expected="activations in float32, and hosts that load adapters",
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
