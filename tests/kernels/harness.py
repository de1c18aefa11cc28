"""What a kernel case is, and how kernels are compiled together and run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tvm
from numpy.typing import NDArray
from tvm import tirx
from tvm_ffi import structural_hash

from mlcpipe.compiler.link import find_linker
from mlcpipe.passes import pipeline
from mlcpipe.passes.lowering import KernelModule
from mlcpipe.passes.schedule_kernels import first_rule
from mlcpipe.targets import Target, Variant, compiled_variants, load_target, tvm_target
from tir_schedules.cpu.elementwise import elementwise
from tir_schedules.op import op_of
from tir_schedules.rule import rules_in

Array = NDArray[Any]
EPS = 2.0**-24  # half a unit in the last place of float32, relative
TINY = 2.0**-149  # the smallest float32


class Kernel(Protocol):
    """One compiled function. `symbol` is unique in its library."""

    @property
    def symbol(self) -> str: ...

    def build(self) -> tirx.PrimFunc:
        """The scheduled function."""

    def definition(self) -> tirx.PrimFunc | None:
        """The TE body that the kernel stands for, where there is one."""


@dataclass(frozen=True)
class Call:
    """Arguments of one call, outputs among them, and what outputs must hold: index -> (float64 values, error bound).

    NaN is expected where the values are NaN. Outputs start as NaN or -1, so that an element that is not
    written shows. `views` say what an argument holds where that is not its elements.
    """

    args: tuple[Array | int | float, ...]
    expected: Mapping[int, tuple[Array, Array | float]]
    views: Mapping[int, Callable[[Array], Array]] = field(default_factory=dict)

    def output(self, index: int, tensor: Any) -> Array:
        """What an argument holds after the call, in float64."""
        found: Array = tensor.numpy()
        return self.views.get(index, np.asarray)(found).astype(np.float64)


@dataclass(frozen=True)
class Case:
    """A kernel with data. `rule` is the schedule rule it must get; kernels of one `library` compile together.

    `nbytes` is what one call must at least read and write, `flops` its multiplications and additions; `timed` cases
    have the sizes of real models and are what `bench.kernels` measures, `arithmetic` names the ceiling of `bench.ceiling`
    that limits them.
    """

    name: str
    library: str
    kernel: Kernel
    call: Callable[[], Call]
    nbytes: int = 0
    flops: int = 0
    timed: bool = False
    arithmetic: str = "float32"


def cpu() -> Target:
    """The target that all kernels are tested for: this machine's CPU."""
    return load_target("cpu-native")


@cache
def variant() -> Variant:
    """The one variant of `cpu()`, whose knobs the rules get."""
    return compiled_variants(cpu())[0]


def by_rules(definition: tirx.PrimFunc, **knobs: int | str) -> tuple[str, tirx.PrimFunc]:
    """The first rule that takes a definition, and what it makes of it. `knobs` replace facts of the target."""
    return first_rule(rules_in("cpu"), definition, {**variant().schedule, **knobs})[:2]


def by_elementwise(definition: tirx.PrimFunc) -> tirx.PrimFunc:
    """A definition as the fallback rule schedules it."""
    result = elementwise(definition, op_of(definition), variant().schedule)
    assert isinstance(result, tirx.PrimFunc)
    return result


def compile_together(functions: Mapping[str, tirx.PrimFunc]) -> Mapping[str, Any]:
    """Symbol -> callable, from one IRModule compiled for this CPU."""
    names = first_names(functions)
    library = _generate(functions, names)
    return {name: library[names[name]] for name in functions}


def link_together(
    functions: Mapping[str, tirx.PrimFunc], folder: Path, *, optimized: bool
) -> tuple[str, dict[str, str]]:
    """The path of a shared library of functions for other processes too, and the name of each function in it.

    `optimized`: by LLVM, as those of `compile_together` and of users are. It takes three quarters of the time.
    """
    made, library, names = folder / "kernels.o", folder / "kernels.so", first_names(functions)
    _generate(functions, names, optimized=optimized).write_to_file(str(made))
    find_linker().run(["-shared", "-fPIC", str(made), "-o", str(library)])
    return str(library), names


def first_names(functions: Mapping[str, tirx.PrimFunc]) -> dict[str, str]:
    """Symbol -> that of the first function with this code: kernels for few rows and for many are often one."""
    first: dict[int, str] = {}
    return {name: first.setdefault(structural_hash(func), name) for name, func in functions.items()}


def _generate(functions: Mapping[str, tirx.PrimFunc], names: Mapping[str, str], *, optimized: bool = True) -> Any:
    mod = tvm.IRModule(
        {name: functions[name].with_attr("global_symbol", name) for name in dict.fromkeys(names.values())}
    )
    target = tvm_target(cpu(), variant())
    if not optimized:
        target = tvm.target.Target({**target.export(), "opt-level": 0})
    lowered = pipeline.run(KernelModule(mod, target), pipeline.LLVM)
    return tvm.get_global_func("target.build.llvm")(lowered.mod, target)


def functions_of(cases: Iterable[Case], *, definitions: bool = False) -> dict[str, tirx.PrimFunc]:
    """Symbol -> scheduled kernel of some cases, or their definitions by the fallback rule."""
    kernels = {case.kernel.symbol: case.kernel for case in cases}
    if not definitions:
        return {name: kernel.build() for name, kernel in kernels.items()}
    bodies = {name: kernel.definition() for name, kernel in kernels.items()}
    return {name: by_elementwise(body) for name, body in bodies.items() if body is not None}


def tensors(args: Iterable[Array | int | float]) -> list[Any]:
    """TVM tensors of the arrays; numbers as they are."""
    return [tvm.runtime.tensor(arg) if isinstance(arg, np.ndarray) else arg for arg in args]


def assert_outputs(function: Any, call: Call) -> None:
    """Run and compare every output element with its bound."""
    values = tensors(call.args)
    function(*values)
    for index, (expected, bound) in call.expected.items():
        assert_within(call.output(index, values[index]), expected, bound, f"argument {index}")


def assert_within(found: Array, expected: Array, bound: Array | float, what: str = "") -> None:
    """|found - expected| <= bound elementwise; NaN exactly where `expected` is NaN."""
    assert found.shape == expected.shape, f"{what}: shape {found.shape}, expected {expected.shape}"
    with np.errstate(invalid="ignore"):
        good = (np.abs(found - expected) <= bound) | (found == expected)
    good |= np.isnan(expected) & np.isnan(found)
    if good.all():
        return
    at = tuple(int(i) for i in np.argwhere(~good)[0])
    limit = np.broadcast_to(bound, expected.shape)[at]
    raise AssertionError(
        f"{what}: {int((~good).sum())} of {good.size} elements; first {at}: "
        f"{found[at]!r}, expected {expected[at]!r} within {limit:.3g}"
    )


def unwritten(shape: tuple[int, ...], dtype: str = "float32") -> Array:
    """An output before the call: NaN, or -1 for integers."""
    return np.full(shape, np.nan if dtype.startswith("float") else -1, dtype)


def adversarial(kind: str, shape: tuple[int, ...], rng: np.random.Generator, scale: float = 1.0) -> Array:
    """float32 numbers: `normal`, or with `zeros`, `outlier`s, `denormal`s."""
    x: Array = rng.standard_normal(shape).astype(np.float32) * np.float32(scale)
    if kind == "zeros":
        x[..., : (shape[-1] + 1) // 2] = 0
        x[..., ::5] = -0.0
    elif kind == "outlier":
        x[..., ::7] *= 1000
    elif kind == "denormal":
        x *= np.float32(2.0**-140)
    return x


KINDS = ("normal", "zeros", "outlier", "denormal")
