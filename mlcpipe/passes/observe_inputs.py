"""Returns the inputs of weights in addition to a function's result, for statistics of each matrix's inputs."""

from __future__ import annotations

from tvm import relax

from mlcpipe.passes.lowering import Lowering, Observed, Rebuild, is_op, model_functions, rebuild, tir_op, weight_params


def observe_inputs(state: Lowering) -> Lowering:
    """result -> (result, x of each product with weights to quantize, i32[m, top] of its experts after it, ...).

    `observed` names the weights of each x, which weights of one input share, those of experts apart. The module has one
    model function.
    """
    ((_, func),) = model_functions(state.mod)
    names = {var: weight.name for var, weight in zip(weight_params(func), state.weights) if weight.kind == "scheme"}
    found: dict[tuple[relax.Var, bool], list[str]] = {}  # by input, and whether experts multiply it
    experts: dict[relax.Var, relax.Expr] = {}

    def replacement(work: Rebuild, var: relax.Var, value: relax.Expr) -> relax.Expr | None:
        op = tir_op(work, value)
        if is_op(value, "relax.matmul"):
            x, weight = value.args[0], work.value_of(value.args[1])
            weight = weight.args[0] if is_op(weight, "relax.permute_dims") else None
        elif op is not None and op.kind == "expert_matmul":
            x, weight, experts[x] = value.args[1].fields
        else:
            return None
        if weight in names:
            found.setdefault((x, not is_op(value, "relax.matmul")), []).append(names[weight])
        return None

    def result(output: relax.Expr) -> relax.Expr:
        parts = ([x, experts[x]] if chosen else [x] for x, chosen in found)
        return relax.Tuple([output, *(one for part in parts for one in part)])

    rebuilt = rebuild(state, replacement, result=result)
    observed = tuple(Observed(tuple(several), chosen) for (_, chosen), several in found.items())
    return rebuilt.with_mod(rebuilt.mod, observed=observed)
