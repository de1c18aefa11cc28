"""What backends share: their protocol, libraries with kernels for a device, and running candidates."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tvm
import tvm_ffi
from numpy.typing import NDArray
from tvm import tirx

from mlcpipe.compiler.android_library import link_android_library
from mlcpipe.compiler.build import BuiltVariant, build_for_device, build_kernels
from mlcpipe.compiler.device_library import write_once
from mlcpipe.compiler.link import ANDROID, Linker, export_device_library, library_name
from mlcpipe.compiler.static_library import write_static_device_library
from mlcpipe.devices.base import Device
from mlcpipe.errors import CompileError, last_line
from mlcpipe.passes import pipeline
from mlcpipe.passes.lowering import KernelModule, Lowering
from mlcpipe.support.progress import Progress
from mlcpipe.targets import Target, Variant, triple, tvm_target

KERNEL = "kernel"  # the symbol of a candidate


class LibraryWriter(Protocol):
    """Writes `lib/` of a bundle. `name` and `version` are those of its linker."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str: ...

    def write(
        self, state: Lowering, variants: Sequence[Variant], folder: Path, stem: str, progress: Progress
    ) -> tuple[Path, list[BuiltVariant]]:
        """Write a module after `pipeline.SHARED` as the library `stem` in `folder` -> (path, built variants)."""


class Runner(Protocol):
    """Runs candidates of `mlcpipe tune`."""

    def build(self, func: tirx.PrimFunc) -> Any:
        """Compile a function; it takes tensors of this runner. Raises CompileError."""

    def tensor(self, values: NDArray[Any]) -> Any:
        """The values as a tensor in the device's memory."""

    def seconds(self, function: Any, copies: Sequence[Sequence[Any]]) -> float:
        """Seconds per call: the mean over one call with each copy of the arguments."""


class Backend(Protocol):
    """A backend's module. `OPTIONS`: options of `mlcpipe compile` that `find` takes.

    A module without a runner may name in `MEASURED_IN` the module of `mlcpipe.tuning` that measures elsewhere, and in
    `NATIVE_SOURCES` the folder of what the native runtime is built with to run on its devices on `NATIVE_SYSTEMS`.
    """

    OPTIONS: tuple[str, ...]

    def find(self, target: Target, **options: bool) -> LibraryWriter:
        """The tools that write a target's library. Raises CompileError that names a missing one."""

    def source(self, scheduled: Lowering) -> str:
        """Human-readable code of a scheduled module."""

    def runner(self, target: Target, variant: Variant) -> Runner:
        """What runs candidates on this machine. Raises CompileError or TargetError if nothing can."""


@dataclass(frozen=True)
class DeviceLibrary:
    """A library for this machine that contains kernels for one kind of device.

    `generator`: a context in which TVM generates a target's code; it yields modules to link next to the model.
    `compiler`: the tool that generates code, "" if that is part of mlcpipe or TVM; `build` tells builds of it apart.
    `finish` edits the object files before they are linked.
    `archiver`: writes a static library with a table of symbols too, as for a CPU.
    `kernel_phase`: the last phase of kernels before TVM generates code.
    """

    linker: Linker
    generator: Callable[[Lowering], AbstractContextManager[Sequence[Any]]]
    compiler: str = ""
    finish: Callable[[Sequence[Path]], None] | None = None
    archiver: Linker | None = None
    kernel_phase: pipeline.Phase = pipeline.SHADERS
    build: str = ""

    @property
    def name(self) -> str:
        return self.linker.name

    @property
    def version(self) -> str:
        return f"{self.linker.version}, {self.compiler}" if self.compiler else self.linker.version

    def write(
        self, state: Lowering, variants: Sequence[Variant], folder: Path, stem: str, progress: Progress
    ) -> tuple[Path, list[BuiltVariant]]:
        scheduled = pipeline.run(replace(state, variant=variants[0]), pipeline.SCHEDULE)
        static = f"lib{stem}.a"
        path = folder / (library_name(stem, self.linker.system) if self.linker.links else static)
        tools = (self.linker, self.archiver, self.compiler, self.build)
        write_once(scheduled, folder, stem, tools, lambda made: self._write(scheduled, made / static, made / path.name))
        return path, [BuiltVariant(variants[0], scheduled.kernels, (path,), path.stat().st_size)]

    def _write(self, scheduled: Lowering, static: Path, path: Path) -> None:
        with self.generator(scheduled) as extra_modules:
            executable = build_for_device(
                scheduled, registered=False, extra_modules=extra_modules, kernel_phase=self.kernel_phase
            )
        if self.archiver is not None:
            write_static_device_library(executable.mod, static, self.linker, self.archiver, triple(scheduled.target))
        if self.linker.system == ANDROID:
            link_android_library(static, path, self.linker)
        elif self.linker.links:
            export_device_library(executable.mod, path, self.linker, triple(scheduled.target), self.finish)


@contextmanager
def global_functions(functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Replace functions of TVM's global registry while inside."""
    before = {name: tvm.get_global_func(name, allow_missing=True) for name in functions}
    try:
        for name, function in functions.items():
            tvm_ffi.register_global_func(name, function, override=True)
        yield
    finally:
        for name, original in before.items():
            if original is None:
                tvm_ffi.registry.remove_global_func(name)
            else:
                tvm_ffi.register_global_func(name, original, override=True)


@dataclass(frozen=True)
class DeviceRunner:
    """Runs candidates on a GPU of this machine, through TVM's device."""

    target: Target
    variant: Variant
    device: Device
    kernel_phase: pipeline.Phase = pipeline.SHADERS

    def build(self, func: tirx.PrimFunc) -> Any:
        mod = tvm.IRModule({KERNEL: func.with_attr("global_symbol", KERNEL)})
        try:
            kernels = KernelModule(mod, tvm_target(self.target, self.variant))
            return build_kernels(kernels, self.kernel_phase)[KERNEL]
        except (RuntimeError, ValueError, TypeError) as error:
            raise CompileError("code generation failed", found=last_line(error)) from error

    def tensor(self, values: NDArray[Any]) -> Any:
        return tvm.runtime.tensor(np.ascontiguousarray(values), self._tvm_device)

    def seconds(self, function: Any, copies: Sequence[Sequence[Any]]) -> float:
        self._tvm_device.sync()
        began = time.perf_counter()
        for values in copies:
            function(*values)
        self._tvm_device.sync()
        return (time.perf_counter() - began) / len(copies)

    @property
    def _tvm_device(self) -> Any:
        return tvm.device(self.device.KIND, self.device.index)
