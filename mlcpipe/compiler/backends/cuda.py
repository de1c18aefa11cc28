"""Libraries with machine code for NVIDIA's GPUs, which NVRTC compiles ahead of time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mlcpipe.compiler.backends.base import DeviceLibrary, DeviceRunner, Runner, global_functions
from mlcpipe.compiler.backends.nvrtc import codegen
from mlcpipe.compiler.backends.nvrtc.nvrtc import find_nvrtc
from mlcpipe.compiler.build import build_for_device
from mlcpipe.compiler.link import find_linker
from mlcpipe.devices import cuda
from mlcpipe.passes import pipeline
from mlcpipe.passes.lowering import Lowering
from mlcpipe.targets import Target, Variant

OPTIONS = ()


def find(target: Target) -> DeviceLibrary:
    """Find NVRTC and the linker. Raises CompileError that names the missing one."""
    nvrtc = find_nvrtc()

    @contextmanager
    def generator(scheduled: Lowering) -> Iterator[Sequence[Any]]:
        with global_functions(codegen.callbacks(codegen.fat_binary(nvrtc, scheduled.target.architectures))):
            yield ()

    return DeviceLibrary(
        find_linker(),
        generator,
        f"{nvrtc.name} {nvrtc.version}",
        codegen.mark_compiled,
        kernel_phase=pipeline.SOURCES,
        build=f"{nvrtc.build}, {codegen.has_runtime()}",
    )


def source(scheduled: Lowering) -> str:
    """CUDA C++."""
    sources: list[str] = []

    def keep(generated: str) -> bytes:
        sources.append(generated)
        return b"no machine code"

    with global_functions(codegen.callbacks(keep)):
        build_for_device(scheduled, registered=False, kernel_phase=pipeline.SOURCES)
    return "\n".join(sources)


def runner(target: Target, variant: Variant) -> Runner:
    """Runs candidates on the first CUDA device. Raises TargetError without one, CompileError without NVRTC."""
    device = cuda.choose()
    codegen.register(codegen.fat_binary(find_nvrtc(), target.architectures))
    return DeviceRunner(target, variant, device, pipeline.SOURCES)
