"""A lowered IRModule becomes machine code: one executable a variant, all of them in one module."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tvm
from tvm import relax, tirx
from tvm.relax.analysis import all_global_vars

from mlcpipe.errors import CompileError
from mlcpipe.passes.lowering import KernelReport, Lowering
from mlcpipe.passes.pipeline import LOWER_TO_VM, PER_VARIANT, lower_for_llvm, run
from mlcpipe.runtime.variants import marker, prefix
from mlcpipe.targets import Variant

CodeGenerator = Callable[[tvm.IRModule, tvm.target.Target], Any]


@dataclass(frozen=True)
class BuiltVariant:
    """The code of one variant in the object file `path`, why its kernels are as they are, and what it took."""

    variant: Variant
    kernels: tuple[KernelReport, ...]
    path: Path
    nbytes: int
    seconds: dict[str, float]


def build(state: Lowering) -> Any:
    """The `tvm.relax.VMExecutable` of a module that `pipeline.PASSES` went over: one variant, with its LLVM module.

    Raises CompileError with TVM's last words.
    """
    lowered, _ = run(state, LOWER_TO_VM)
    builder, kernels = _bytecode(lowered, "")
    library = _or_compile_error(lowered, lambda: _generate(kernels, lowered.tvm_target))
    return _executable(builder, lowered, library)


def build_variants(
    state: Lowering, variants: Sequence[Variant], folder: Path, object_format: str, threads: int
) -> tuple[Any, list[BuiltVariant]]:
    """All variants of a module that `pipeline.SHARED` went over -> (module to export, what was built), in their order.

    The root of the module is the last variant, which every machine of the architecture runs, under plain names: a host
    that knows nothing of variants gets that one. It imports the executables of the others, whose symbols have
    `prefix(name)`. Scheduling needs Python and goes one by one, meanwhile `threads` generate code into `folder`.
    Raises CompileError with TVM's last words.
    """
    lowered, _ = run(state, LOWER_TO_VM)
    pending = []
    pool = ThreadPoolExecutor(threads)
    try:
        for variant in variants:
            began = time.perf_counter()
            scheduled, _ = run(replace(state, variant=variant), PER_VARIANT)
            one = _with_kernels(lowered, scheduled)
            builder, kernels = _bytecode(one, "" if variant is variants[-1] else prefix(variant.name))
            path = folder / f"{variant.name}.{object_format}"
            done = {"schedule": time.perf_counter() - began}
            pending.append((one, builder, done, path, pool.submit(_write_object, one, kernels, path)))
        executables, built = [], []
        for one, builder, done, path, future in pending:
            names, seconds = future.result()
            library = tvm.runtime.load_static_library(str(path), names)
            executables.append(_executable(builder, one, library))
            built.append(BuiltVariant(one.variant, one.kernels, path, path.stat().st_size, done | seconds))
    finally:
        pool.shutdown(cancel_futures=True)  # after Ctrl-C or an error only what is running is waited for
    root = executables[-1].mod
    for executable in executables[:-1]:
        root.import_module(executable.mod)
    return root, built


def _with_kernels(lowered: Lowering, scheduled: Lowering) -> Lowering:
    """The lowered module with the kernels of one variant."""
    mod = tvm.IRModule(dict(lowered.mod.functions))
    for gv, func in scheduled.mod.functions.items():
        if isinstance(func, tirx.PrimFunc):
            mod[lowered.mod.get_global_var(gv.name_hint)] = func
    return replace(scheduled, mod=mod)


@dataclass(frozen=True)
class _Kernels:
    """PrimFuncs by who calls them: hosts, with any arguments, or only code that knows the shapes of its own tensors."""

    of_hosts: tvm.IRModule
    internal: tvm.IRModule


def _bytecode(state: Lowering, symbols: str) -> tuple[relax.ExecBuilder, _Kernels]:
    """The VM's code, which says what variant it is, and the kernels that it calls, whose names begin with `symbols`.

    The code generator takes the symbol of a function that it calls from an ExternFunc of the module. (The prefix that
    AttachGlobalSymbol knows rewrites the kernels' bodies, and fails on a buffer's view.)
    """
    functions = state.mod.functions
    called = {gv for f in functions.values() if isinstance(f, relax.Function) for gv in all_global_vars(f)}
    calls: dict[tvm.ir.GlobalVar, relax.Function | relax.ExternFunc] = {}
    of_hosts: dict[tvm.ir.GlobalVar, tirx.PrimFunc] = {}
    internal: dict[tvm.ir.GlobalVar, tirx.PrimFunc] = {}
    for gv, func in functions.items():
        if isinstance(func, tirx.PrimFunc):
            name = symbols + gv.name_hint
            calls[gv] = relax.ExternFunc(name)
            kernels = internal if gv in called else of_hosts
            kernels[tvm.ir.GlobalVar(name)] = func.with_attr("global_symbol", name)
        else:
            calls[gv] = func
    builder = relax.ExecBuilder()
    with builder.function(marker(state.variant.name), num_inputs=1):
        builder.emit_ret(builder.r(0))
    tvm.get_global_func("relax.VMCodeGen")(builder, tvm.IRModule(calls, attrs=state.mod.attrs))
    return builder, _Kernels(tvm.IRModule(of_hosts), tvm.IRModule(internal))


def _generate(kernels: _Kernels, target: tvm.target.Target) -> Any:
    """The LLVM module of some kernels. The VM checks what hosts hand it, so that its kernels need not."""
    mod = lower_for_llvm(kernels.internal, target, checked=False)
    mod.update(lower_for_llvm(kernels.of_hosts, target))
    return tvm.get_global_func("target.build.llvm")(mod, target)


def _write_object(state: Lowering, kernels: _Kernels, path: Path) -> tuple[list[str], dict[str, float]]:
    """Generate the code of one variant; its functions' names and seconds by step."""
    began = time.perf_counter()
    library = _or_compile_error(state, lambda: _generate(kernels, state.tvm_target))
    optimized = time.perf_counter()
    _or_compile_error(state, lambda: library.write_to_file(str(path)))
    names = [str(name) for name in library["get_func_names"]()]
    return names, {"optimize": optimized - began, "generate": time.perf_counter() - optimized}


def _executable(builder: relax.ExecBuilder, state: Lowering, library: Any) -> relax.VMExecutable:
    link = tvm.get_global_func("relax.VMLink")
    return relax.VMExecutable(link(builder, state.tvm_target, library, [], {}))


def _or_compile_error(state: Lowering, work: Callable[[], Any]) -> Any:
    try:
        with state.tvm_target:
            return work()
    except (RuntimeError, ValueError, TypeError) as error:
        lines = [line for line in str(error).strip().splitlines() if line.strip()] or [type(error).__name__]
        where = f"target {state.target.name}, variant {state.variant.name}"
        raise CompileError("code generation failed", where=where, found=lines[-1]) from error


def generated_source(executable: Any) -> str:
    """The machine code of an executable that `build` made, as assembly."""
    modules, found = [executable.mod], []
    while modules:
        module = modules.pop()
        modules.extend(module.imports)
        if module.kind == "llvm":
            found.append(str(module.inspect_source("asm")))
    return "\n".join(found)
