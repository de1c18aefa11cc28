"""`model.wasm` for browsers: VM code, code that launches kernels, their WGSL, and TVM's runtime."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mlcpipe.compiler.backends.base import Runner
from mlcpipe.compiler.backends.wasm import wgsl
from mlcpipe.compiler.backends.wasm.emscripten import Emscripten, find_emcc
from mlcpipe.compiler.backends.wasm.link import link_wasm
from mlcpipe.compiler.backends.wasm.runtime import runtime_objects
from mlcpipe.compiler.build import BuiltVariant, build_for_device, generated_source
from mlcpipe.compiler.device_library import write_once
from mlcpipe.errors import CompileError, TargetError
from mlcpipe.passes import pipeline
from mlcpipe.passes.lowering import Lowering
from mlcpipe.support.env import env
from mlcpipe.support.progress import Progress
from mlcpipe.targets import Target, Variant

OPTIONS = ("quick",)
MEASURED_IN = "node"


@dataclass(frozen=True)
class WasmLibrary:
    """Writes the library with emcc.

    `quick` links with -O1 instead of -O3: in one second instead of 45, to a file twice as large.
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
        self, state: Lowering, variants: Sequence[Variant], folder: Path, stem: str, progress: Progress
    ) -> tuple[Path, list[BuiltVariant]]:
        objects = runtime_objects(self.emcc, env().cache_dir, progress)
        progress.stage("compile the kernels")
        scheduled = pipeline.run(replace(state, variant=variants[0]), pipeline.SCHEDULE)
        path = folder / f"{stem}.wasm"
        level = "-O1" if self.quick else "-O3"

        def write(made: Path) -> None:
            executable = build_for_device(scheduled, registered=True)
            progress.stage("link the library")
            link_wasm(self.emcc, executable.mod, objects, made / path.name, level)
            wgsl.check_buffers(made / path.name, state.target.limits["max_storage_buffers"])

        write_once(scheduled, folder, stem, (self.emcc, objects[0].parent.name, level), write)
        return path, [BuiltVariant(variants[0], scheduled.kernels, (path,), path.stat().st_size)]


def find(target: Target, *, quick: bool = False) -> WasmLibrary:
    """Find emcc. Raises CompileError if it is missing, TargetError for a target that WGSL cannot express."""
    lanes = int(target.schedule.get("subgroup", 0))
    if bool(lanes) != ("subgroups" in target.features):
        raise TargetError(
            "target file schedule.subgroup", where=target.name, expected="a size, and subgroups among the features",
            found=f"subgroup = {lanes}, features {list(target.features)}"[:200],
        )  # fmt: skip
    return WasmLibrary(find_emcc(), quick)


def source(scheduled: Lowering) -> str:
    """WGSL, and assembly of the code that launches kernels."""
    return wgsl.all_kernels_of(generated_source(build_for_device(scheduled, registered=True), webgpu="wgsl"))


def runner(target: Target, variant: Variant) -> Runner:
    """Raises CompileError: this process has no WebGPU. `mlcpipe/tuning/node.py` measures in Node."""
    raise CompileError("nothing here runs the target's kernels", where=target.name)
