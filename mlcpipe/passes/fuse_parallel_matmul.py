"""Fuses projections of the same input: q, k, v -> qkv; gate, up -> gate_up.

One matmul over all rows reads the input once with fewer, larger kernels; the parts are slices of its result. Joined
weights have the same scheme.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import relax

from mlcpipe.passes.lowering import Lowering, Rebuild, is_op, model_functions, rebuild, weight_params
from mlcpipe.quantization.scheme import Scheme
from mlcpipe.weights.table import Weight, join

_STEPS = ("decode", "embed_texts", "prefill")  # the first that a model has


@dataclass(frozen=True)
class _Group:
    """Weights, by index in the table, that multiply the same input."""

    members: tuple[int, ...]
    weight: Weight


def fuse_parallel_matmul(state: Lowering) -> Lowering:
    """Join the weights of matmuls that share their input, in every model function."""
    groups = _groups(state)
    if not groups:
        return state
    leader = {group.members[0]: group for group in groups}
    member_of = {index: group for group in groups for index in group.members}
    table = tuple(
        leader[i].weight if i in leader else w for i, w in enumerate(state.weights) if i in leader or i not in member_of
    )
    joined: dict[tuple[relax.Var, int], relax.Var] = {}
    index_of: dict[relax.Var, int] = {}
    new_var: dict[int, relax.Var] = {}

    def prologue(work: Rebuild, old: list[relax.Var], new: list[relax.Var]) -> None:
        joined.clear()
        new_var.clear()
        index_of.clear()
        kept = [i for i in range(len(old)) if i in leader or i not in member_of]
        for position, index in enumerate(kept):
            new_var[index] = new[position]
            if index not in leader:
                work.values[old[index]] = new[position]
        index_of.update({var: i for i, var in enumerate(old)})

    def replacement(work: Rebuild, var: relax.Var, value: relax.Expr) -> relax.Expr | None:
        weight = _weight_of(work, value)
        if weight is None or index_of.get(weight) not in member_of:
            return None
        index = index_of[weight]
        group = member_of[index]
        key = (value.args[0], group.members[0])
        if key not in joined:
            transposed = work.emit(relax.op.permute_dims(new_var[group.members[0]]))
            joined[key] = work.emit(relax.op.matmul(value.args[0], transposed))
        begin = sum(state.weights[i].shape[0] for i in group.members[: group.members.index(index)])
        end = begin + state.weights[index].shape[0]
        return relax.op.strided_slice(joined[key], axes=[1], begin=[begin], end=[end])

    return rebuild(state, replacement, table, prologue)


def _weight_of(work: Rebuild, value: relax.Expr) -> relax.Var | None:
    """The old weight variable w of matmul(x, permute_dims(w))."""
    if not is_op(value, "relax.matmul"):
        return None
    transposed = work.value_of(value.args[1])
    if not is_op(transposed, "relax.permute_dims") or not isinstance(transposed.args[0], relax.Var):
        return None
    return transposed.args[0]


def _groups(state: Lowering) -> list[_Group]:
    """Groups of two or more quantizable matrices that multiply one variable in a step."""
    functions = {gv.name_hint: func for gv, func in model_functions(state.mod)}
    func = next((functions[name] for name in _STEPS if name in functions), None)
    if func is None:  # experts alone: their matrices are joined as they are defined
        return []
    index_of = {var: i for i, var in enumerate(weight_params(func))}
    transposed: dict[relax.Var, int] = {}
    by_input: dict[relax.Var, list[int]] = {}
    for block in func.body.blocks:
        for binding in block.bindings:
            value = binding.value
            if is_op(value, "relax.permute_dims") and value.args[0] in index_of:
                transposed[binding.var] = index_of[value.args[0]]
            elif is_op(value, "relax.matmul") and value.args[1] in transposed:
                index = transposed[value.args[1]]
                if state.weights[index].kind == "scheme" and not state.weights[index].parts:
                    by_input.setdefault(value.args[0], []).append(index)
    groups = []
    for members in (m for several in by_input.values() for m in _stored_alike(state, several)):
        weights = [state.weights[i] for i in members]
        if len(members) > 1:
            groups.append(_Group(tuple(members), join(weights, joined_name([w.name for w in weights]))))
    return groups


def _stored_alike(state: Lowering, members: list[int]) -> list[list[int]]:
    """The members, grouped by scheme, column order and block: those of attention are apart from an MLP beside it.

    The kernels of RoPE and of gates take whole products.
    """
    by_form: dict[tuple[Scheme | None, bytes, tuple[str, ...]], list[int]] = {}
    for i in members:
        weight = state.weights[i]
        by_form.setdefault((weight.scheme, weight.columns, tuple(weight.name.split(".")[:-2])), []).append(i)
    return list(by_form.values())


def joined_name(names: list[str]) -> str:
    """MLC's name for joined projections: q_proj, k_proj, v_proj -> qkv_proj; gate_proj, up_proj -> gate_up_proj."""
    parts = [name.split(".") for name in names]
    stems = [p[-2].removesuffix("_proj") for p in parts]
    between = "" if all(len(stem) == 1 for stem in stems) else "_"
    suffix = "_proj" if all(p[-2].endswith("_proj") for p in parts) else ""
    return ".".join([*parts[0][:-2], between.join(stems) + suffix, parts[0][-1]])
