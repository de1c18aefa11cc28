"""How a target's library is written: shared, for this machine's CPU or its GPU, or WebAssembly for browsers."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import tvm

from mlcpipe.compiler import metal, self_test, wgsl
from mlcpipe.compiler.build import BuiltVariant, build, build_for_device, build_variants, generated_source
from mlcpipe.compiler.cuda import build as cuda
from mlcpipe.compiler.cuda.nvrtc import find_nvrtc
from mlcpipe.compiler.emscripten import Emscripten, find_emcc
from mlcpipe.compiler.link import (
    Linker,
    export_archive,
    export_device_library,
    export_library,
    find_linker,
    library_name,
    object_format,
)
from mlcpipe.compiler.spirv import build as spirv
from mlcpipe.compiler.wasm_runtime import runtime_objects
from mlcpipe.env import env
from mlcpipe.errors import TargetError
from mlcpipe.passes import pipeline
from mlcpipe.passes.lowering import Lowering
from mlcpipe.progress import Progress
from mlcpipe.runtime import vulkan
from mlcpipe.runtime.threads import physical_cores
from mlcpipe.targets import Target, Variant, triple


class LibraryWriter(Protocol):
    """Something that makes `lib/` of a bundle, with the name and version of its linker."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str: ...

    def write(
        self, state: Lowering, variants: Sequence[Variant], folder: Path, progress: Progress
    ) -> tuple[Path, list[BuiltVariant]]:
        """Write the library of a module that `pipeline.SHARED` went over -> its path, what was built."""

    def source(self, scheduled: Lowering) -> str:
        """The code that is generated for a module that `pipeline.PASSES` went over, to be read."""


@dataclass(frozen=True)
class SharedLibrary:
    """A shared library with a variant for each level of instructions."""

    linker: Linker

    @property
    def name(self) -> str:
        return self.linker.name

    @property
    def version(self) -> str:
        return self.linker.version

    def write(
        self, state: Lowering, variants: Sequence[Variant], folder: Path, progress: Progress
    ) -> tuple[Path, list[BuiltVariant]]:
        path = folder / library_name()
        with tempfile.TemporaryDirectory() as objects:
            module, built = build_variants(state, variants, Path(objects), object_format(), physical_cores())
            paths = [object_ for one in reversed(built) for object_ in one.paths]
            export_library(module, paths, path, self.linker, triple(state.target))
        return path, built

    def source(self, scheduled: Lowering) -> str:
        return generated_source(build(scheduled))


@dataclass(frozen=True)
class WasmLibrary:
    """`model.wasm`: the VM's code, the host parts of kernels, their WGSL, and TVM's runtime.

    `quick` is -O1 instead of -O3: it links in a second, not in three quarters of a minute, to a file twice as large.
    """

    emcc: Emscripten
    quick: bool = False

    @property
    def name(self) -> str:
        return self.emcc.name

    @property
    def version(self) -> str:
        return self.emcc.version

    def write(
        self, state: Lowering, variants: Sequence[Variant], folder: Path, progress: Progress
    ) -> tuple[Path, list[BuiltVariant]]:
        objects = runtime_objects(self.emcc, env().cache_dir, progress)
        progress.stage("compile the kernels")
        scheduled, seconds = pipeline.run(replace(state, variant=variants[0]), pipeline.PER_VARIANT)
        with own_barriers():
            executable = build_for_device(scheduled, registered=True)
        path = folder / "model.wasm"
        progress.stage("link the library")
        link_wasm(self.emcc, executable.mod, objects, path, "-O1" if self.quick else "-O3")
        return path, [BuiltVariant(variants[0], scheduled.kernels, (path,), path.stat().st_size, seconds)]

    def source(self, scheduled: Lowering) -> str:
        with own_barriers():
            return wgsl.all_kernels_of(generated_source(build_for_device(scheduled, registered=True)))


@dataclass(frozen=True)
class DeviceLibrary:
    """A shared library for this machine with kernels for its devices of one kind in it.

    `prepare` makes a code generator for a lowering's target TVM's own, and gives what goes into the library beside the
    model. `compiler`: what it generates code with, "" where that is part of mlcpipe or TVM. `finish` edits the object
    files that are linked.
    """

    linker: Linker
    prepare: Callable[[Lowering], Sequence[Any]]
    compiler: str = ""
    finish: Callable[[Sequence[Path]], None] | None = None

    @property
    def name(self) -> str:
        return self.linker.name

    @property
    def version(self) -> str:
        return f"{self.linker.version}, {self.compiler}" if self.compiler else self.linker.version

    def write(
        self, state: Lowering, variants: Sequence[Variant], folder: Path, progress: Progress
    ) -> tuple[Path, list[BuiltVariant]]:
        began = time.perf_counter()
        scheduled, seconds = pipeline.run(replace(state, variant=variants[0]), pipeline.PER_VARIANT)
        executable = self._build(scheduled)
        seconds |= {"generate": time.perf_counter() - began - sum(seconds.values())}
        path = self._export(executable.mod, folder, triple(state.target))
        return path, [BuiltVariant(variants[0], scheduled.kernels, (path,), path.stat().st_size, seconds)]

    def source(self, scheduled: Lowering) -> str:
        return generated_source(self._build(scheduled))

    def _build(self, scheduled: Lowering, registered: bool = False) -> Any:
        beside = self.prepare(scheduled)
        with own_barriers():
            return build_for_device(scheduled, registered=registered, beside=beside)

    def _export(self, module: Any, folder: Path, made_for: str) -> Path:
        path = folder / library_name(self.linker.system)
        export_device_library(module, path, self.linker, made_for, self.finish)
        return path


@dataclass(frozen=True)
class CudaLibrary(DeviceLibrary):
    """A shared library with machine code for NVIDIA's GPUs in it."""

    def source(self, scheduled: Lowering) -> str:
        found: list[str] = []

        def keep(source: str) -> bytes:
            found.append(source)
            return b"no machine code"

        cuda.register(keep)
        with own_barriers():
            build_for_device(scheduled, registered=False)
        return "\n".join(found)


@dataclass(frozen=True)
class MetalLibrary(DeviceLibrary):
    """A library for a Mac with the source of kernels in it."""

    def source(self, scheduled: Lowering) -> str:
        found: list[str] = []
        metal.register(found)
        with own_barriers():
            build_for_device(scheduled, registered=False)
        return "\n".join(found)


@dataclass(frozen=True)
class MetalArchive(MetalLibrary):
    """A static library for an app, which links it with a TVM runtime of its own; functions register when it starts."""

    def _build(self, scheduled: Lowering, registered: bool = True) -> Any:
        return super()._build(scheduled, registered)

    def _export(self, module: Any, folder: Path, made_for: str) -> Path:
        path = folder / "libmodel.a"
        export_archive(module, path, self.linker, made_for)
        return path


def _for_vulkan(scheduled: Lowering) -> Sequence[Any]:
    """SPIR-V for whichever devices there are, with what the runtime tries their drivers with."""
    vulkan.load()
    spirv.register()
    target = scheduled.tvm_target
    tests = [_self_test(target)]
    if scheduled.variant.schedule.get("matrix_rows"):
        with own_barriers():
            tests.append(tvm.tirx.build(tvm.IRModule(self_test.matrices(scheduled.variant.schedule)), target=target))
    return tests


def _self_test(target: tvm.target.Target) -> Any:
    """What the runtime tries a driver with. Its schedules are TVM's, which needs the barriers that TVM sees."""
    half = bool(target.attrs.get("supports_float16", False))
    return tvm.tirx.build(tvm.IRModule(self_test.functions(target, float16=half)), target=target)


def own_barriers() -> tvm.transform.PassContext:
    """Leave barriers to the kernels, which have them where they are needed.

    TVM's ThreadSync sees hazards where invocations keep to their own elements, and fails on those in conditions; what
    it would guard is that StorageRewrite puts two shared arrays in one place. And kernels state how much memory they
    need: to find out takes CompactBufferAllocation three quarters of a compilation.
    """
    passes = ["s_tir.ThreadSync", "s_tir.CompactBufferAllocation"]
    return tvm.transform.PassContext(disabled_pass=passes, config={"tirx.disable_storage_rewrite": True})


def link_wasm(emcc: Emscripten, module: object, runtime: Sequence[Path], path: Path, level: str) -> None:
    """Write a module for kind webgpu as `path`, with the objects of TVM's runtime. Raises CompileError."""
    options = {
        "WASM_BIGINT": "1",
        "ERROR_ON_UNDEFINED_SYMBOLS": "0",  # the host defines TVMFFIWasm*
        "STANDALONE_WASM": "1",
        "ALLOW_MEMORY_GROWTH": "1",
        "TOTAL_MEMORY": "16MB",
    }

    def fcompile(target: str, files: Sequence[str], options_: object = None, **_: object) -> None:
        wgsl.finish([Path(file) for file in files])
        settings = [word for key, value in options.items() for word in ("-s", f"{key}={value}")]
        arguments = [level, "--no-entry", *settings, "-o", target, *map(str, runtime), *files]
        emcc.run(arguments, path.parent)

    fcompile.object_format = "o"  # type: ignore[attr-defined]
    module.export_library(str(path), fcompile=fcompile)  # type: ignore[attr-defined]


def _shared(quick: bool) -> LibraryWriter:
    return SharedLibrary(find_linker())


def _wasm(quick: bool) -> LibraryWriter:
    return WasmLibrary(find_emcc(), quick)


def _device(quick: bool) -> LibraryWriter:
    return DeviceLibrary(find_linker(), _for_vulkan)


def _cuda(quick: bool) -> LibraryWriter:
    nvrtc = find_nvrtc()

    def prepare(scheduled: Lowering) -> Sequence[Any]:
        cuda.register(cuda.fat_binary(nvrtc, scheduled.target.architectures))
        return ()

    return CudaLibrary(find_linker(), prepare, f"{nvrtc.name} {nvrtc.version}", cuda.mark_compiled)


def _for_metal(scheduled: Lowering) -> Sequence[Any]:
    metal.register()
    return ()


def _metal(quick: bool) -> LibraryWriter:
    return MetalLibrary(metal.find_apple_linker(), _for_metal)


def _metal_archive(quick: bool) -> LibraryWriter:
    return MetalArchive(metal.find_archiver(), _for_metal)


_WRITERS: Mapping[str, Callable[[bool], LibraryWriter]] = {
    "shared": _shared,
    "wasm": _wasm,
    "device": _device,
    "cuda": _cuda,
    "metal": _metal,
    "metal-archive": _metal_archive,
}


def find_writer(target: Target, quick: bool = False) -> LibraryWriter:
    """What writes the target's kind of library. Raises TargetError for another kind, CompileError without a linker."""
    if target.link not in _WRITERS:
        raise TargetError("target file link", where=target.name, expected=" or ".join(_WRITERS), found=target.link)
    return _WRITERS[target.link](quick)
