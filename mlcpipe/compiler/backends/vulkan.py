"""Libraries with SPIR-V for Vulkan devices, and with the kernels that check their drivers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mlcpipe.compiler import driver_check
from mlcpipe.compiler.backends.base import DeviceLibrary, DeviceRunner, Runner
from mlcpipe.compiler.backends.spirv import codegen
from mlcpipe.compiler.build import build_for_device, generated_source
from mlcpipe.compiler.link import find_archiver, find_linker
from mlcpipe.devices import vulkan
from mlcpipe.devices.support import vulkan_plugin
from mlcpipe.errors import CompileError, TargetError
from mlcpipe.passes.lowering import Lowering
from mlcpipe.support.resources import native_path
from mlcpipe.targets import Target, Variant, triple

OPTIONS = ()
NATIVE_SOURCES, NATIVE_SYSTEMS = native_path() / "vulkan", ("android", "linux")


def find(target: Target) -> DeviceLibrary:
    """Find the linker for the target's machine, and TVM's plugin or a compiler for it. Raises CompileError."""
    try:
        vulkan_plugin.check()
    except TargetError as error:
        raise CompileError(error.what, expected=error.expected, found=error.found, next_step=error.next_step) from error
    linker, archiver = find_linker(triple(target)), find_archiver() if target.archive else None
    return DeviceLibrary(linker, _generator, archiver=archiver)


@contextmanager
def _generator(scheduled: Lowering) -> Iterator[Sequence[Any]]:
    vulkan.load()
    codegen.register()
    float16 = bool(scheduled.tvm_target.attrs.get("supports_float16", False))
    yield driver_check.modules(scheduled, float16=float16)


def source(scheduled: Lowering) -> str:
    """Assembly of the code that launches kernels; SPIR-V has no text here."""
    with _generator(scheduled) as checks:
        return generated_source(build_for_device(scheduled, registered=False, extra_modules=checks))


def runner(target: Target, variant: Variant) -> Runner:
    """Runs candidates on the best Vulkan device. Raises TargetError if there is none."""
    vulkan.load()
    codegen.register()
    return DeviceRunner(target, variant, vulkan.choose())
