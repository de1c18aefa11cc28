"""A shared library for CPUs, with a variant for each level of instructions."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tvm
from numpy.typing import NDArray
from tvm import tirx

from mlcpipe.compiler.android_library import link_android_library
from mlcpipe.compiler.backends.base import KERNEL, Runner
from mlcpipe.compiler.build import BuiltVariant, build, build_variants, generated_source
from mlcpipe.compiler.link import (
    ANDROID,
    Linker,
    export_library,
    find_archiver,
    find_linker,
    library_name,
    object_format,
)
from mlcpipe.compiler.static_library import write_static_library
from mlcpipe.devices.support.threads import physical_cores, use_threads
from mlcpipe.errors import CompileError, last_line
from mlcpipe.passes import pipeline
from mlcpipe.passes.lowering import KernelModule, Lowering
from mlcpipe.support.progress import Progress
from mlcpipe.targets import Target, Variant, triple, tvm_target

OPTIONS = ()


@dataclass(frozen=True)
class CpuLibrary:
    """Writes the library with a linker, and a static one where there is an archiver."""

    linker: Linker
    archiver: Linker | None = None

    @property
    def name(self) -> str:
        return self.linker.name

    @property
    def version(self) -> str:
        return self.linker.version

    def write(
        self, state: Lowering, variants: Sequence[Variant], folder: Path, stem: str, progress: Progress
    ) -> tuple[Path, list[BuiltVariant]]:
        library, target = folder / library_name(stem, self.linker.system), tvm_target(state.target, variants[-1])
        static = folder / f"lib{stem}.a"
        with tempfile.TemporaryDirectory() as objects:
            module, built = build_variants(state, variants, Path(objects), object_format(), physical_cores())
            if self.archiver is not None:
                write_static_library(module, built, static, self.linker, self.archiver, target)
            if not self.linker.links:
                return static, built
            paths = [path for built_variant in reversed(built) for path in built_variant.paths]
            if self.linker.system == ANDROID:
                link_android_library(static, library, self.linker)
            else:
                export_library(module, paths, library, self.linker, target)
        return library, built


def find(target: Target) -> CpuLibrary:
    """Find the linker for the target's machine. Raises CompileError if there is none."""
    return CpuLibrary(find_linker(triple(target)), find_archiver() if target.archive else None)


def source(scheduled: Lowering) -> str:
    """Assembly."""
    return generated_source(build(scheduled))


def kernel_module(target: Target, variant: Variant, functions: Mapping[str, tirx.PrimFunc]) -> Any:
    """The code of scheduled functions, under their names here. Raises CompileError."""
    compiled = tvm_target(target, variant)
    try:
        named = {name: func.with_attr("global_symbol", name) for name, func in functions.items()}
        kernels = KernelModule(tvm.IRModule(named), compiled)
        return tvm.get_global_func("target.build.llvm")(pipeline.run(kernels, pipeline.LLVM).mod, compiled)
    except (RuntimeError, ValueError, TypeError) as error:
        raise CompileError("code generation failed", found=last_line(error)) from error


@dataclass(frozen=True)
class CpuRunner:
    """Runs candidates on this machine's CPU, with as many threads as a model would have."""

    target: Target
    variant: Variant

    def build(self, func: tirx.PrimFunc) -> Any:
        return kernel_module(self.target, self.variant, {KERNEL: func})[KERNEL]

    def tensor(self, values: NDArray[Any]) -> Any:
        return tvm.runtime.tensor(values)

    def seconds(self, function: Any, copies: Sequence[Sequence[Any]]) -> float:
        began = time.perf_counter()
        for values in copies:
            function(*values)
        return (time.perf_counter() - began) / len(copies)


def runner(target: Target, variant: Variant) -> Runner:
    """The CPU."""
    use_threads()
    return CpuRunner(target, variant)
