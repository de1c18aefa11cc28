"""A lowered IRModule becomes machine code: one executable a variant, all of them in one module."""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.relax.analysis import all_global_vars

from mlcpipe.compiler.device_kernels import build_kernels
from mlcpipe.errors import CompileError
from mlcpipe.passes.lowering import KernelReport, Lowering
from mlcpipe.passes.pipeline import LOWER_TO_VM, PER_VARIANT, lower_for_llvm, run
from mlcpipe.runtime.variants import marker, prefix
from mlcpipe.targets import Variant
from tir_schedules.op import is_by_hand

# Kinds of modules with code to read -> the format that `inspect_source` takes.
_SOURCE_FORMATS = {"llvm": "asm", "webgpu": "wgsl"}

CodeGenerator = Callable[[tvm.IRModule, tvm.target.Target], Any]


@dataclass(frozen=True)
class BuiltVariant:
    """The code of one variant in object files, why its kernels are as they are, and what it took."""

    variant: Variant
    kernels: tuple[KernelReport, ...]
    paths: tuple[Path, ...]
    nbytes: int
    seconds: dict[str, float]


@dataclass(frozen=True, eq=False)
class Kernels:
    """PrimFuncs of one object file: of hosts, which call with any arguments, and of code that knows its own tensors.

    Equal where the code is.
    """

    of_hosts: tvm.IRModule
    internal: tvm.IRModule
    target: tvm.target.Target

    def __hash__(self) -> int:
        return hash((tvm_ffi.structural_hash(self.of_hosts), tvm_ffi.structural_hash(self.internal), str(self.target)))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Kernels)
            and str(self.target) == str(other.target)
            and tvm_ffi.structural_equal(self.of_hosts, other.of_hosts)
            and tvm_ffi.structural_equal(self.internal, other.internal)
        )


def build(state: Lowering) -> Any:
    """The `tvm.relax.VMExecutable` of a module that `pipeline.PASSES` went over: one variant, with its LLVM module.

    Raises CompileError with TVM's last words.
    """
    lowered, _ = run(state, LOWER_TO_VM)
    builder, parts = _bytecode(lowered, "")
    return _executable(builder, lowered, _or_compile_error(lowered, lambda: [_generate(part) for part in parts]))


def build_for_device(state: Lowering, *, registered: bool = True, beside: Sequence[Any] = ()) -> Any:
    """As `build`, for a target whose kernels run on a device: host code in LLVM, which imports the device's module.

    `registered`: functions register themselves when the program starts, for hosts that cannot look symbols up.
    `beside`: more modules for the library.
    """
    lowered, _ = run(state, LOWER_TO_VM)
    builder, parts = _bytecode(lowered, "")
    mod = tvm.IRModule({})
    for part in parts:
        mod.update(part.of_hosts)
        mod.update(part.internal)
    mod = mod.with_attr("system_lib_prefix", "") if registered else mod
    library = _or_compile_error(lowered, lambda: build_kernels(mod, lowered.tvm_target))
    return _executable(builder, lowered, [library, *beside])


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
            builder, parts = _bytecode(one, "" if variant is variants[-1] else prefix(variant.name))
            paths = [folder / f"{variant.name}-{i}.{object_format}" for i in range(len(parts))]
            done = {"schedule": time.perf_counter() - began}
            futures = [pool.submit(_write_object, one, part, path) for part, path in zip(parts, paths)]
            pending.append((one, builder, done, paths, futures))
        executables, built = [], []
        for one, builder, done, paths, futures in pending:
            objects = [future.result() for future in futures]
            libraries = [tvm.runtime.load_static_library(str(p), list(o.names)) for p, o in zip(paths, objects)]
            executables.append(_executable(builder, one, libraries))
            seconds = done | {"generate": sum(o.seconds for o in objects)}
            nbytes = sum(len(o.code) for o in objects)
            built.append(BuiltVariant(one.variant, one.kernels, tuple(paths), nbytes, seconds))
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


def _bytecode(state: Lowering, symbols: str) -> tuple[relax.ExecBuilder, list[Kernels]]:
    """The VM's code, which says what variant it is, and the kernels that it calls, whose names begin with `symbols`.

    The kernels are in two parts, of about as much work: those of the cache and of sampling, which are the same for
    many models and quantizations, and the others.
    The code generator takes the symbol of a function that it calls from an ExternFunc of the module. (The prefix that
    AttachGlobalSymbol knows rewrites the kernels' bodies, and fails on a buffer's view.)
    """
    functions = state.mod.functions
    called = {gv for f in functions.values() if isinstance(f, relax.Function) for gv in all_global_vars(f)}
    calls: dict[tvm.ir.GlobalVar, relax.Function | relax.ExternFunc] = {}
    kernels: dict[tuple[bool, bool], dict[tvm.ir.GlobalVar, tirx.PrimFunc]] = defaultdict(dict)
    for gv, func in functions.items():
        if isinstance(func, tirx.PrimFunc):
            name = symbols + gv.name_hint
            calls[gv] = relax.ExternFunc(name)
            part = kernels[is_by_hand(func), gv in called]
            part[tvm.ir.GlobalVar(name)] = func.with_attr("global_symbol", name)
        else:
            calls[gv] = func
    builder = relax.ExecBuilder()
    with builder.function(marker(state.variant.name), num_inputs=1):
        builder.emit_ret(builder.r(0))
    tvm.get_global_func("relax.VMCodeGen")(builder, tvm.IRModule(calls, attrs=state.mod.attrs))
    parts = [
        Kernels(tvm.IRModule(kernels[part, False]), tvm.IRModule(kernels[part, True]), state.tvm_target)
        for part in (False, True)
    ]
    return builder, [part for part in parts if part.of_hosts.functions or part.internal.functions]


def _generate(kernels: Kernels) -> Any:
    """The LLVM module of some kernels. The VM checks what hosts hand it, so that its kernels need not."""
    with kernels.target:
        mod = lower_for_llvm(kernels.internal, kernels.target, checked=False)
        mod.update(lower_for_llvm(kernels.of_hosts, kernels.target))
        return tvm.get_global_func("target.build.llvm")(mod, kernels.target)


@dataclass(frozen=True)
class ObjectFile:
    """An object file, the functions in it, and the seconds that it took now."""

    code: bytes
    names: tuple[str, ...]
    seconds: float = 0.0


def _write_object(state: Lowering, kernels: Kernels, path: Path) -> ObjectFile:
    began = time.perf_counter()
    made: ObjectFile = _or_compile_error(state, lambda: object_file(kernels, path.suffix))
    path.write_bytes(made.code)
    return replace(made, seconds=time.perf_counter() - began)


@lru_cache(maxsize=16)
def object_file(kernels: Kernels, suffix: str) -> ObjectFile:
    """The code of some kernels, kept for the next model that has the same ones: half a MiB each."""
    library = _generate(kernels)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"code{suffix}")
        library.write_to_file(str(path))
        return ObjectFile(path.read_bytes(), tuple(str(name) for name in library["get_func_names"]()))


def _executable(builder: relax.ExecBuilder, state: Lowering, libraries: Sequence[Any]) -> relax.VMExecutable:
    link = tvm.get_global_func("relax.VMLink")
    return relax.VMExecutable(link(builder, state.tvm_target, libraries[0], list(libraries[1:]), {}))


def _or_compile_error(state: Lowering, work: Callable[[], Any]) -> Any:
    try:
        return work()
    except (RuntimeError, ValueError, TypeError) as error:
        lines = [line for line in str(error).strip().splitlines() if line.strip()] or [type(error).__name__]
        where = f"target {state.target.name}, variant {state.variant.name}"
        raise CompileError("code generation failed", where=where, found=lines[-1]) from error


def generated_source(executable: Any) -> str:
    """The code of an executable that `build` made: assembly, WGSL."""
    modules, found = [executable.mod], []
    while modules:
        module = modules.pop()
        modules.extend(module.imports)
        if module.kind in _SOURCE_FORMATS:
            found.append(str(module.inspect_source(_SOURCE_FORMATS[module.kind])))
    return "\n".join(found)
