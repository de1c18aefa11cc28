"""Machine code of a lowered IRModule: one executable per variant, all of them in one module."""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.relax.analysis import all_global_vars
from tvm.tirx.build import split_host_device_mods, tir_to_runtime

from mlcpipe.compiler.kernel_store import KernelStore, kernel_store, key_of
from mlcpipe.compiler.object_file import ObjectFile
from mlcpipe.compiler.scratch import FEW_ROWS, Allocations, Scratch, allocations
from mlcpipe.errors import CompileError, last_line
from mlcpipe.passes.lowering import KernelModule, KernelReport, Lowering
from mlcpipe.passes.pipeline import DEVICE, HOST, LLVM, SCHEDULE, SHADERS, UNCHECKED, VM, Phase, run
from mlcpipe.runtime.variants import marker, prefix
from mlcpipe.support import debug
from mlcpipe.targets import Variant
from tir_schedules.op import is_by_hand, op_of

# LLVM's attributes for instructions that kernels call by name, and no other code has.
_BYTE_PRODUCTS = frozenset({"+amx-tile", "+amx-bf16", "+avxvnni", "+i8mm"})


@dataclass(frozen=True)
class BuiltVariant:
    """The object files of one variant with the symbols of their functions, and the rule that scheduled each kernel."""

    variant: Variant
    kernels: tuple[KernelReport, ...]
    paths: tuple[Path, ...]
    nbytes: int
    symbols: tuple[str, ...] = ()
    scratch: Scratch | None = None


@dataclass(frozen=True, eq=False)
class Kernels:
    """PrimFuncs of one object file: `of_hosts` may be called with any arguments, `internal` only by the VM's own code.

    `name` and `dump` are those of a `KernelModule`. `hashes` of functions where they are known.
    """

    of_hosts: tvm.IRModule
    internal: tvm.IRModule
    target: tvm.target.Target
    name: str = "kernels"
    dump: Path | None = None
    hashes: Mapping[str, str] = field(default_factory=dict)

    def lowered(self) -> tvm.IRModule:
        """Input of LLVM's code generator. Internal kernels skip argument checks: the VM has checked what hosts pass."""
        of_hosts = KernelModule(self.of_hosts, self.target, f"{self.name}_of_hosts", self.dump)
        mod = run(replace(of_hosts, mod=self.internal, name=self.name), LLVM, UNCHECKED).mod
        mod.update(run(of_hosts, LLVM).mod)
        return mod

    def key(self, suffix: str) -> str:
        """What tells these object files from all others: code, names, the target and the versions."""
        mods = (self.of_hosts, self.internal)
        names = [(gv.name_hint, mod[gv]) for mod in mods for gv in mod.get_global_vars()]
        functions = [[name, self.hashes.get(name) or _hash(func)] for name, func in names]
        counts = [len(mod.functions) for mod in mods]
        return key_of(json.dumps([counts, functions]), tvm.ir.save_json(self.target), suffix)


def build(state: Lowering) -> Any:
    """The `tvm.relax.VMExecutable` of a scheduled module: one variant, with its LLVM module.

    Raises CompileError with TVM's final error line.
    """
    lowered = run(state, VM)
    builder, parts = _bytecode(_plain(lowered))
    libraries = _or_compile_error(lowered, lambda: [_generate(part, part.lowered()) for part in parts])
    return _executable(builder, lowered, libraries)


def build_for_device(
    state: Lowering, *, registered: bool = True, extra_modules: Sequence[Any] = (), kernel_phase: Phase = SHADERS
) -> Any:
    """Like `build`, for kernels that run on a device: an LLVM module of host code imports the device's module.

    `registered`: functions register themselves at program start, for hosts that cannot look up symbols.
    `extra_modules` are linked into the same library.
    """
    lowered = run(state, VM)
    builder, parts = _bytecode(_plain(lowered))
    mod = tvm.IRModule({})
    for part in parts:
        mod.update(part.of_hosts)
        mod.update(part.internal)
    internal = frozenset(gv.name_hint for part in parts for gv in part.internal.get_global_vars())
    mod = mod.with_attr("system_lib_prefix", "") if registered else mod
    kernels = KernelModule(mod, lowered.tvm_target, lowered.name, lowered.dump)
    library = _or_compile_error(lowered, lambda: build_kernels(kernels, kernel_phase, internal))
    return _executable(builder, lowered, [library, *extra_modules])


def build_kernels(kernels: KernelModule, kernel_phase: Phase = SHADERS, internal: frozenset[str] = frozenset()) -> Any:
    """Compile kernels to a module of host code that launches them and imports their module. The target needs a host.

    `kernel_phase` is SHADERS, or SOURCES for kernels that a compiler with its own optimizations takes as source.
    `internal` are functions that the VM's own code alone calls, as in `Kernels`.
    """
    lowered = run(kernels, DEVICE)
    host, devices = split_host_device_mods(lowered.mod)
    shaders = {target: run(lowered.with_mod(mod), kernel_phase).mod for target, mod in devices.items()}
    unchecked = tvm.IRModule({gv: func for gv, func in host.functions.items() if gv.name_hint in internal})
    if len(unchecked.functions):
        host.update(run(lowered.with_mod(unchecked), UNCHECKED).mod)
    host = run(lowered.with_mod(host), HOST).mod
    began = time.perf_counter()
    built = tir_to_runtime(host, shaders, kernels.tvm_target.host)
    debug.show_time(f"{kernels.name} generate code", began)
    return built


def build_variants(
    state: Lowering, variants: Sequence[Variant], folder: Path, object_format: str, threads: int
) -> tuple[Any, list[BuiltVariant]]:
    """All variants of a module after `pipeline.SHARED` -> (module to export, what was built), in their order.

    The root is the last variant, which runs on every machine of the architecture. Its symbols are plain, so hosts that
    know no variants run it. It imports the executables of the others, whose symbols begin with `prefix(name)`. Variants
    that differ in how bytes are multiplied share the kernels by hand that do not.
    Variants are scheduled one after another in Python; meanwhile `threads` generate code into `folder`.
    Raises CompileError with TVM's final error line.
    """
    lowered = run(state, VM)
    pending: list[tuple[_Named, relax.ExecBuilder, list[Path], list[Future[ObjectFile]]]] = []
    pool, store = ThreadPoolExecutor(threads), kernel_store(state.dump)
    try:
        for variant in reversed(variants):
            one = _with_kernels(lowered, run(replace(state, variant=variant), SCHEDULE))
            of_hosts = "" if variant is variants[-1] else prefix(variant.name)
            named = _named(one, of_hosts, [done[0] for done in pending])
            builder, parts = _bytecode(named)
            paths = [folder / f"{variant.name}-{i}.{object_format}" for i in range(len(parts))]
            futures = [pool.submit(_write_object, one, part, path, store) for part, path in zip(parts, paths)]
            pending.append((named, builder, paths, futures))
        executables, built = [], []
        allocations: dict[str, Allocations] = {}
        for named, builder, paths, futures in pending:
            objects = [future.result() for future in futures]
            libraries = [tvm.runtime.load_static_library(str(p), list(o.names)) for p, o in zip(paths, objects)]
            executables.append(_executable(builder, named.state, libraries))
            nbytes = sum(len(o.code) for o in objects)
            names = tuple(name for o in objects for name in o.names)
            for one_file in objects:
                allocations |= one_file.allocations
            variant, kernels = named.state.variant, named.state.kernels
            scratch = _scratch(named, allocations)
            built.append(BuiltVariant(variant, kernels, tuple(paths), nbytes, names, scratch))
    finally:
        pool.shutdown(cancel_futures=True)  # after Ctrl-C or an error, wait only for running work
        if store is not None:
            store.trim()
    root = executables[0].mod
    for executable in reversed(executables[1:]):
        root.import_module(executable.mod)
    return root, built[::-1]


def _scratch(named: _Named, allocations: Mapping[str, Allocations]) -> Scratch:
    """What kernels of a variant take: those of prompts for a whole chunk, the others for `FEW_ROWS` rows."""
    functions = {gv.name_hint: func for gv, func in named.state.mod.functions.items()}
    of_prompts = ("prefill", "prefill_adapted", "embed_texts")
    many = {gv.name_hint for name in of_prompts if name in functions for gv in all_global_vars(functions[name])}
    chunk = named.state.bounds.get("n", FEW_ROWS)
    return Scratch.most(
        allocations[symbol].at(chunk if name in many else FEW_ROWS)
        for name, symbol in named.symbols.items()
        if symbol in allocations
    )


def _with_kernels(lowered: Lowering, scheduled: Lowering) -> Lowering:
    """The lowered module with the kernels of one variant."""
    mod = tvm.IRModule(dict(lowered.mod.functions))
    for gv, func in scheduled.mod.functions.items():
        if isinstance(func, tirx.PrimFunc):
            mod[lowered.mod.get_global_var(gv.name_hint)] = func
    return replace(scheduled, mod=mod)


@dataclass(frozen=True)
class _Named:
    """A variant's module with its kernels: the symbol of each by its name, and the names of those that other variants
    define; `called` are those that the VM's own code calls, and hosts do not. `hashes`: by symbols.
    """

    state: Lowering
    symbols: Mapping[str, str]
    elsewhere: frozenset[str]
    called: frozenset[str]
    hashes: Mapping[str, str] = field(default_factory=dict)


def _plain(state: Lowering) -> _Named:
    """Kernels under their own names."""
    return _Named(state, {name: name for name in _prim_funcs(state.mod)}, frozenset(), _called(state))


def _named(state: Lowering, prefix: str, others: Sequence[_Named]) -> _Named:
    """Kernels that hosts look up begin with a prefix, the others are named by their code, or as one of `others` names
    the same kernel, if it is by hand.
    """
    kernels, called = _prim_funcs(state.mod), _called(state)
    made_for = f"{prefix} {state.tvm_target}"
    codes = {name: _hash(func) for name, func in kernels.items() if name in called}
    symbols = {name: prefix + name for name in kernels}
    symbols |= {name: _symbol(kernels[name], made_for, code) for name, code in codes.items()}
    hashes = {symbols[name]: code for name, code in codes.items()}
    elsewhere: set[str] = set()
    for other in others:
        if not _has_its_code(state.variant, other.state.variant):
            continue
        theirs = _prim_funcs(other.state.mod)
        for name, func in kernels.items():
            if name in called and is_by_hand(func) and tvm_ffi.structural_equal(func, theirs.get(name)):
                symbols[name] = other.symbols[name]
                elsewhere.add(name)
    return _Named(state, symbols, frozenset(elsewhere), called, hashes)


def _called(state: Lowering) -> frozenset[str]:
    """The names that the VM's own code calls."""
    functions = [func for func in state.mod.functions.values() if isinstance(func, relax.Function)]
    return frozenset(gv.name_hint for func in functions for gv in all_global_vars(func))


def _symbol(func: tirx.PrimFunc, made_for: str, code: str) -> str:
    """The name of a kernel that hosts do not look up: the same for the same code of a variant, in whichever model."""
    op = op_of(func)
    digest = hashlib.sha256(f"{made_for} {code}".encode())
    return f"{op.kind if op else 'kernel'}_{digest.hexdigest()[:16]}"


def _hash(func: tirx.PrimFunc) -> str:
    """A hash of a function without its symbol. To write all of it as JSON takes 10 ms for a matrix product."""
    return hashlib.sha256(tvm.ir.save_json(func.without_attr("global_symbol")).encode()).hexdigest()


def _has_its_code(variant: Variant, other: Variant) -> bool:
    """Whether code for another variant is what LLVM would make for this one, where nothing multiplies bytes."""
    more = set(variant.mattr) - set(other.mattr)
    return variant.mcpu == other.mcpu and set(other.mattr) <= set(variant.mattr) and more <= _BYTE_PRODUCTS


def _prim_funcs(mod: tvm.IRModule) -> dict[str, tirx.PrimFunc]:
    return {gv.name_hint: func for gv, func in mod.functions.items() if isinstance(func, tirx.PrimFunc)}


def _bytecode(named: _Named) -> tuple[relax.ExecBuilder, list[Kernels]]:
    """The VM's bytecode with a marker of its variant, and the kernels that it calls and no other variant defines.

    Each kernel is an object file of its own, which other models with the same kernel take from the store.
    The VM's code generator takes the symbol of a callee from an ExternFunc. AttachGlobalSymbol has a prefix too, but it
    rewrites the kernels' bodies and fails on a view of a buffer.
    """
    state = named.state
    calls: dict[tvm.ir.GlobalVar, relax.Function | relax.ExternFunc] = {}
    kernels: dict[str, tuple[tirx.PrimFunc, bool]] = {}
    for gv, func in state.mod.functions.items():
        if not isinstance(func, tirx.PrimFunc):
            calls[gv] = func
            continue
        symbol = named.symbols[gv.name_hint]
        calls[gv] = relax.ExternFunc(symbol)
        if gv.name_hint not in named.elsewhere:
            kernels[symbol] = (
                func.with_attr({"global_symbol": symbol, "tirx.noalias": True}),
                gv.name_hint in named.called,
            )
    builder = relax.ExecBuilder()
    with builder.function(marker(state.variant.name), num_inputs=1):
        builder.emit_ret(builder.r(0))
    tvm.get_global_func("relax.VMCodeGen")(builder, tvm.IRModule(calls, attrs=state.mod.attrs))
    groups = [[symbol] for symbol in kernels] if state.dump is None else [list(kernels)]  # a dump shows them together
    return builder, [_kernels(named, {symbol: kernels[symbol] for symbol in group}) for group in groups]


def _kernels(named: _Named, kernels: Mapping[str, tuple[tirx.PrimFunc, bool]]) -> Kernels:
    """Kernels of one object file, by symbol: function, and whether the VM's own code alone calls it."""
    of_hosts, internal = tvm.IRModule(), tvm.IRModule()
    for symbol, (func, called) in kernels.items():
        (internal if called else of_hosts)[tvm.ir.GlobalVar(symbol)] = func
    state = named.state
    return Kernels(of_hosts, internal, state.tvm_target, f"{state.name}/kernels", state.dump, named.hashes)


def _generate(kernels: Kernels, lowered: tvm.IRModule) -> Any:
    """Compile lowered kernels to an LLVM module."""
    began = time.perf_counter()
    with kernels.target:
        library = tvm.get_global_func("target.build.llvm")(lowered, kernels.target)
    debug.show_time(f"{kernels.name} generate code", began)
    return library


def _write_object(state: Lowering, kernels: Kernels, path: Path, store: KernelStore | None) -> ObjectFile:
    def make() -> ObjectFile:
        return new_object_file(kernels, path.suffix)

    def get() -> ObjectFile:
        return make() if store is None else store.get(kernels.key(path.suffix), ObjectFile, make)

    made: ObjectFile = _or_compile_error(state, get)
    path.write_bytes(made.code)
    return made


def new_object_file(kernels: Kernels, suffix: str) -> ObjectFile:
    """Compile kernels to an object file."""
    lowered = kernels.lowered()
    library = _generate(kernels, lowered)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"code{suffix}")
        library.write_to_file(str(path))
        names = tuple(str(name) for name in library["get_func_names"]())
        return ObjectFile(path.read_bytes(), names, allocations(lowered))


def _executable(builder: relax.ExecBuilder, state: Lowering, libraries: Sequence[Any]) -> relax.VMExecutable:
    link = tvm.get_global_func("relax.VMLink")
    return relax.VMExecutable(link(builder, state.tvm_target, libraries[0], list(libraries[1:]), {}))


def _or_compile_error(state: Lowering, work: Callable[[], Any]) -> Any:
    try:
        return work()
    except (RuntimeError, ValueError, TypeError) as error:
        where = f"target {state.target.name}, variant {state.variant.name}"
        raise CompileError("code generation failed", where=where, found=last_line(error)) from error


def generated_source(executable: Any, **formats: str) -> str:
    """Assembly of an executable that `build` or `build_for_device` made.

    `formats` adds modules of other kinds: kind -> the format argument of `inspect_source`; llvm="" leaves assembly out.
    """
    formats = {"llvm": "asm", **formats}
    modules, sources = [executable.mod], []
    while modules:
        module = modules.pop()
        modules.extend(module.imports)
        if formats.get(module.kind):
            sources.append(str(module.inspect_source(formats[module.kind])))
    return "\n".join(sources)
