"""The state between passes, and how passes rebuild model functions binding by binding.

A `Lowering` is the IRModule with its weight table. Once virtual machine code is separated from the kernels, a
`KernelModule` holds PrimFuncs only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import tvm
from tvm import relax
from tvm.relax.expr import _update_type
from tvm.relax.expr_functor import PyExprMutator, mutator

from mlcpipe.nn.module_builder import ModuleBuilder
from mlcpipe.quantization.layout import Layout
from mlcpipe.quantization.native_formats import native_scheme
from mlcpipe.quantization.scheme import Scheme, load_scheme, scheme_names
from mlcpipe.targets import Target, Variant, tvm_target
from mlcpipe.tuned.records import Tuned
from mlcpipe.weights.table import Weight
from tir_schedules.adapter_shape import AdapterShape
from tir_schedules.op import Op, op_of

# Launches along a dimension that every device allows (Vulkan's and WebGPU's minimum): the bound of a grid extent that
# only the host knows. With a larger bound TVM would compute indices in 64 bits, which not every GPU has.
ANY_GRID = 2**16 - 1
BY_HAND = "by hand"  # instead of a rule: the kernel comes with its schedule
Replace = Callable[["Rebuild", relax.Var, relax.Expr], "relax.Expr | None"]


@dataclass(frozen=True)
class Adapted:
    """A projection with adapters: its `name`, its kernel's shape, and the checkpoint's tensor of each part.

    `order` is that of the weight's rows.
    """

    name: str
    shape: AdapterShape
    sources: tuple[str, ...]
    order: bytes = b""


@dataclass(frozen=True)
class Observed:
    """The inputs of the named weights: results of a model function, x and, with `experts`, the experts of its rows."""

    names: tuple[str, ...]
    experts: bool


class Module(Protocol):
    """The pipeline's view of a state; the IR is dumped to the folder `name` in `dump`."""

    @property
    def mod(self) -> tvm.IRModule: ...

    @property
    def tvm_target(self) -> tvm.target.Target: ...

    @property
    def name(self) -> str: ...

    @property
    def dump(self) -> Path | None: ...

    def with_mod(self, mod: tvm.IRModule) -> Any: ...


@dataclass(frozen=True)
class KernelModule:
    """PrimFuncs of one variant, for a code generator; `mod` has their global symbols."""

    mod: tvm.IRModule
    tvm_target: tvm.target.Target
    name: str = "kernels"
    dump: Path | None = None

    def with_mod(self, mod: tvm.IRModule) -> KernelModule:
        """The same with another module."""
        return replace(self, mod=mod)


@dataclass(frozen=True)
class KernelReport:
    """The schedule rule of a PrimFunc, why earlier rules declined, and the tuning records used."""

    name: str
    op: str
    rule: str
    reason: str
    records: tuple[str, ...] = ()


@dataclass(frozen=True)
class Lowering:
    """The state between passes. Model functions take inputs, then one variable per stored array of `weights`.

    `variant` is the one to schedule kernels for; earlier passes do not depend on it.
    `bounds` are the largest values of symbolic sizes, by name. `dump` is a folder for the IR after every pass.
    `adapters`: also compile forwards with LoRA adapters; `adapted` are the projections they change, in the order of
    the adapters' arrays. `observed` are inputs of products that a function also returns.
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
    dump: Path | None = None
    adapters: bool = False
    adapted: tuple[Adapted, ...] = ()
    observed: tuple[Observed, ...] = ()

    @property
    def name(self) -> str:
        """The target's name and, once kernels are scheduled, the variant's."""
        return f"{self.target.name}/{self.variant.name}" if self.kernels else self.target.name

    @property
    def tvm_target(self) -> tvm.target.Target:
        """The TVM target of the variant."""
        return tvm_target(self.target, self.variant)

    def with_mod(self, mod: tvm.IRModule, **changes: Any) -> Lowering:
        """The same lowering with another module."""
        return replace(self, mod=mod, **changes)


@mutator
class Substitute(PyExprMutator):  # type: ignore[misc]
    """Replaces variables according to `values`."""

    def __init__(self, values: dict[relax.Var, relax.Expr]) -> None:
        super().__init__()
        self.values = values

    def visit_var_(self, var: relax.Var) -> relax.Expr:
        return self.values.get(var, var)

    def visit_dataflow_var_(self, var: relax.DataflowVar) -> relax.Expr:
        return self.values.get(var, var)


class Rebuild:
    """One function being rebuilt: `values` maps old variables to new expressions."""

    def __init__(self, bb: relax.BlockBuilder) -> None:
        self.bb = bb
        self.values: dict[relax.Var, relax.Expr] = {}
        self._substitute = Substitute(self.values)

    def new(self, expr: relax.Expr) -> relax.Expr:
        """`expr` with old variables replaced."""
        return self._substitute.visit_expr(expr)

    def value_of(self, expr: relax.Expr) -> relax.Expr:
        """The expression that a new variable is bound to, or `expr` itself."""
        bound = self.bb.lookup_binding(expr) if isinstance(expr, relax.Var) else None
        return expr if bound is None else bound

    def emit(self, expr: relax.Expr, name: str = "") -> relax.Var:
        """Bind a new variable."""
        return self.bb.emit(expr, name)

    def call_tir(self, func: Any, name: str, args: Iterable[relax.Expr], out: Any) -> relax.Expr:
        """A call of `func`, added to the module once."""
        return relax.call_tir(self.bb.add_func(func, name), list(args), out)


def with_bindings(func: relax.Function, bindings: list[relax.Binding], result: relax.Expr) -> relax.Function:
    """The function with one block of other bindings, and a result of the same type."""
    body = relax.SeqExpr([relax.BindingBlock(bindings)], result)
    _update_type(body, func.body.ty)
    return relax.Function(func.params, body, func.ret_ty, func.is_pure, func.attrs)


def model_functions(mod: tvm.IRModule) -> list[tuple[tvm.ir.GlobalVar, relax.Function]]:
    """The Relax functions that take weights."""
    functions = [(gv, f) for gv, f in mod.functions.items() if isinstance(f, relax.Function)]
    return [(gv, f) for gv, f in functions if len(f.params) > int(f.attrs["num_input"])]


def weight_params(func: relax.Function) -> list[relax.Var]:
    """The variables of a model function that are weights, in the order of the weight table's arrays."""
    return list(func.params[int(func.attrs["num_input"]) :])


def weight_vars(weights: Iterable[Weight], rows: tvm.tirx.PrimExpr) -> list[relax.Var]:
    """Fresh variables for every stored array of the table; those of a gathered one have `rows` rows."""
    made = []
    for w in weights:
        gathered = w.gathered_arrays()
        for name, (shape, dtype) in w.arrays().items():
            shape = (rows, *shape[1:]) if name in gathered else shape
            made.append(relax.Var(name, relax.TensorType(shape, dtype)))
    return made


def rebuild(
    state: Lowering,
    replacement: Replace,
    weights: tuple[Weight, ...] | None = None,
    prologue: Callable[[Rebuild, list[relax.Var], list[relax.Var]], None] | None = None,
    result: Callable[[relax.Expr], relax.Expr] | None = None,
) -> Lowering:
    """Rebuild every model function: `replacement` may return a new expression for a binding.

    With `weights` the functions take that table's variables, and `prologue(rebuild, old, new)` maps old to new.
    `result` maps the old result of the function to the new one. Unused bindings are dropped.
    """
    functions = model_functions(state.mod)
    names = {gv.name_hint for gv, _ in functions}
    rest = {gv: f for gv, f in state.mod.functions.items() if gv.name_hint not in names}
    bb = ModuleBuilder(tvm.IRModule(rest))
    for gv, func in functions:
        count = int(func.attrs["num_input"])
        old = weight_params(func)
        new = old if weights is None else weight_vars(weights, _rows_of(func))
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
                output = work.new(func.body.body)
                output = bb.emit_output(output if result is None else result(output))
            bb.emit_func_output(output)
    mod = relax.transform.DeadCodeElimination()(bb.get())
    return state.with_mod(mod, **({} if weights is None else {"weights": weights}))


def _rows_of(func: relax.Function) -> tvm.tirx.PrimExpr:
    """The number of a function's rows, which is that of its first input: tokens, or what stands for them."""
    first = func.params[0].ty
    return first.shape[0] if isinstance(first, relax.TensorType) else tvm.tirx.Var("rows", "int64")


def storage_bytes(func: relax.Function) -> list[int]:
    """Bytes of each planned storage of a function, at the size bounds."""
    names = ("relax.memory.alloc_storage", "relax.vm.alloc_storage")
    values = (binding.value for block in func.body.blocks for binding in block.bindings)
    sizes = (value.args[0].values[0] for value in values if any(is_op(value, name) for name in names))
    return [int(size) for size in sizes if isinstance(size, int | tvm.tirx.IntImm)]


def workspace_bytes(mod: tvm.IRModule) -> dict[str, int]:
    """Function name -> bytes of all its storages."""
    functions = {gv.name_hint: func for gv, func in mod.functions.items() if isinstance(func, relax.Function)}
    return {name: sum(storage_bytes(func)) for name, func in functions.items()}


def is_op(expr: relax.Expr, name: str) -> bool:
    """True if `expr` calls the Relax operator of that name."""
    return isinstance(expr, relax.Call) and isinstance(expr.op, tvm.ir.Op) and expr.op.name == name


def columns_of(work: Rebuild, expr: relax.Expr) -> tuple[relax.Expr, int, int] | None:
    """(matrix, begin, end) if `expr` is these columns of a matrix: a slice, or a field of a split."""
    value = work.value_of(expr)
    if is_op(value, "relax.strided_slice"):
        axes, begin, end = ([int(i.value) for i in fields] for fields in value.args[1:4])
        return (value.args[0], begin[0], end[0]) if axes == [1] else None
    split = work.value_of(value.tuple_value) if isinstance(value, relax.TupleGetItem) else None
    if split is None or not is_op(split, "relax.split") or int(split.attrs.axis) != 1:
        return None
    widths = [int(field.shape[1]) for field in split.ty.fields]
    return split.args[0], sum(widths[: value.index]), sum(widths[: value.index + 1])


def tir_op(work: Rebuild, call: relax.Expr) -> Op | None:
    """The operation of the tagged PrimFunc that `call` calls; None for other expressions."""
    called = is_op(call, "relax.call_tir") or is_op(call, "relax.call_tir_inplace")
    if not called or not isinstance(call.args[0], tvm.ir.GlobalVar):
        return None
    return op_of(work.bb.get()[call.args[0]])


def scheme_of(state: Lowering, op: Op) -> Scheme:
    """The scheme of a packed weight: a native format, or the one with the operation's numbers, which store alike."""
    if "scheme" in op.facts:
        return native_scheme(op.str("scheme"))
    wanted = (op.int("bits"), op.str("dtype"), op.int("group_size"))
    named = (load_scheme(name) for name in scheme_names())
    k = op.int("k")
    return next(one for one in (state.scheme, *named) if (one.bits, one.model_dtype, one.group(k)) == wanted)
