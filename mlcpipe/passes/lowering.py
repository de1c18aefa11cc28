"""What passes work on: the IRModule with its weight table, and a way to rebuild model functions binding by binding."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from mlcpipe.compiler.weights import Weight
from mlcpipe.quantization.layout import Layout
from mlcpipe.quantization.scheme import Scheme
from mlcpipe.targets import Target, Variant, tvm_target
from mlcpipe.tuning.records import Tuned
from tir_schedules.op import Op, op_of

BY_HAND = "by hand"  # instead of a rule: the kernel came with its schedule
Replace = Callable[["Rebuild", relax.Var, relax.Expr], "relax.Expr | None"]


@dataclass(frozen=True)
class KernelReport:
    """Which schedule rule a PrimFunc got, what the rules before it said, and the tuning records that it used."""

    name: str
    op: str
    rule: str
    reason: str
    records: tuple[str, ...] = ()


@dataclass(frozen=True)
class Lowering:
    """The state between passes. Model functions take inputs, then one variable a stored array of `weights`.

    `variant` is the one that kernels are scheduled for; the passes before that give the same for every variant.
    """

    mod: tvm.IRModule
    weights: tuple[Weight, ...]
    target: Target
    variant: Variant
    scheme: Scheme
    layout: Layout
    kernels: tuple[KernelReport, ...] = ()
    bounds: dict[str, int] = field(default_factory=dict)
    tuned: Tuned = Tuned()

    @property
    def tvm_target(self) -> tvm.target.Target:
        """The TVM target of the variant."""
        return tvm_target(self.target, self.variant)

    def with_mod(self, mod: tvm.IRModule, **changes: Any) -> Lowering:
        """The same lowering with another module."""
        return replace(self, mod=mod, **changes)


@mutator
class _Substitute(PyExprMutator):  # type: ignore[misc]
    """Replaces variables by what `values` maps them to."""

    def __init__(self, values: dict[relax.Var, relax.Expr]) -> None:
        super().__init__()
        self.values = values

    def visit_var_(self, var: relax.Var) -> relax.Expr:
        return self.values.get(var, var)

    def visit_dataflow_var_(self, var: relax.DataflowVar) -> relax.Expr:
        return self.values.get(var, var)


class Rebuild:
    """One function on its way to its new form: `values` maps old variables to new expressions."""

    def __init__(self, bb: relax.BlockBuilder) -> None:
        self.bb = bb
        self.values: dict[relax.Var, relax.Expr] = {}
        self._substitute = _Substitute(self.values)

    def new(self, expr: relax.Expr) -> relax.Expr:
        """`expr` with old variables replaced."""
        return self._substitute.visit_expr(expr)

    def value_of(self, expr: relax.Expr) -> relax.Expr:
        """What a new variable is bound to, or the expression itself."""
        bound = self.bb.lookup_binding(expr) if isinstance(expr, relax.Var) else None
        return expr if bound is None else bound

    def emit(self, expr: relax.Expr, name: str = "") -> relax.Var:
        """Bind a new variable."""
        return self.bb.emit(expr, name)

    def call_tir(self, func: Any, name: str, args: Iterable[relax.Expr], out: Any) -> relax.Expr:
        """A call of `func`, added to the module once."""
        return relax.call_tir(self.bb.add_func(func, name), list(args), out)


def model_functions(mod: tvm.IRModule) -> list[tuple[tvm.ir.GlobalVar, relax.Function]]:
    """The Relax functions that take weights."""
    found = [(gv, f) for gv, f in mod.functions.items() if isinstance(f, relax.Function)]
    return [(gv, f) for gv, f in found if len(f.params) > int(f.attrs["num_input"])]


def weight_params(func: relax.Function) -> list[relax.Var]:
    """The variables of a model function that are weights, in the order of the weight table's arrays."""
    return list(func.params[int(func.attrs["num_input"]) :])


def weight_vars(weights: Iterable[Weight]) -> list[relax.Var]:
    """Fresh variables for every stored array of the table."""
    return [
        relax.Var(name, relax.TensorType(shape, dtype)) for w in weights for name, (shape, dtype) in w.arrays().items()
    ]


def rebuild(
    state: Lowering,
    replacement: Replace,
    weights: tuple[Weight, ...] | None = None,
    prologue: Callable[[Rebuild, list[relax.Var], list[relax.Var]], None] | None = None,
) -> Lowering:
    """Rebuild every model function: `replacement` may answer a binding with another expression.

    With `weights` the functions get the variables of that table, and `prologue(rebuild, old, new)` maps old to new.
    Bindings that nothing reads any more are dropped.
    """
    functions = model_functions(state.mod)
    names = {gv.name_hint for gv, _ in functions}
    rest = {gv: f for gv, f in state.mod.functions.items() if gv.name_hint not in names}
    bb = relax.BlockBuilder(tvm.IRModule(rest))
    for gv, func in functions:
        count = int(func.attrs["num_input"])
        old = weight_params(func)
        new = old if weights is None else weight_vars(weights)
        work = Rebuild(bb)
        with bb.function(gv.name_hint, [*func.params[:count], *new], attrs={"num_input": count}):
            with bb.dataflow():
                if prologue is not None:
                    prologue(work, old, new)
                for block in func.body.blocks:
                    for binding in block.bindings:
                        value = work.new(binding.value)
                        replaced = replacement(work, binding.var, value)
                        work.values[binding.var] = work.emit(value if replaced is None else replaced, binding.var.name)
                output = bb.emit_output(work.new(func.body.body))
            bb.emit_func_output(output)
    mod = relax.transform.DeadCodeElimination()(bb.get())
    return state.with_mod(mod, **({} if weights is None else {"weights": weights}))


def is_op(expr: relax.Expr, name: str) -> bool:
    """True if `expr` calls the Relax operator of that name."""
    return isinstance(expr, relax.Call) and isinstance(expr.op, tvm.ir.Op) and expr.op.name == name


def tir_op(work: Rebuild, call: relax.Expr) -> Op | None:
    """What the tagged PrimFunc computes that `call` calls; None for any other expression."""
    if not is_op(call, "relax.call_tir") or not isinstance(call.args[0], tvm.ir.GlobalVar):
        return None
    return op_of(work.bb.get()[call.args[0]])


def scheme_of(state: Lowering, op: Op) -> Scheme:
    """The scheme of a packed weight: the model's, or its plain companion (routers)."""
    if op.int("bits") == state.scheme.bits:
        return state.scheme
    return Scheme(f"q0f{op.str('dtype')[5:]}", op.str("dtype"))
