"""Metal devices of a Mac, through TVM's Metal runtime, which comes in its wheel for macOS. Not yet run on hardware.

Relies on TVM's src/backend/metal/runtime: it describes a device by little more than the memory that Metal recommends,
compiles a kernel's source at its first call, and copies to a device through staging buffers, of which it keeps up to 64
of any size until the next wait for the device.
"""

from __future__ import annotations

import functools
import platform
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import tvm_ffi
from numpy.typing import NDArray

from mlcpipe.bundle import to_tvm
from mlcpipe.devices import base
from mlcpipe.devices.support import tvm_devices, tvm_runtime
from mlcpipe.errors import TargetError
from mlcpipe.host.cpu import cpu_model
from mlcpipe.host.finding import Finding, byte_size
from mlcpipe.host.memory import FreeMemory, free_memory
from mlcpipe.targets import target_names

TVM_KIND, TITLE = "metal", "a Mac's GPU"
GPUS_OF = ("darwin",)  # values of sys.platform
_MAX_DEVICES = 32  # of TVM's runtime
STAGED_BYTES = 16 << 20
# TVM's message when Metal gives no buffer.
_NO_MEMORY = ("buf != nil", "Failed to allocate", "Insufficient Memory", "OutOfMemory")
_OF_METAL = ("metal", "Metal", "GPUError", "MTL", *_NO_MEMORY)


@dataclass(frozen=True)
class Device(base.Device):
    """A device: `name` is the chip's, "Apple M2 Max"; `memory_bytes` is the most that Metal recommends to use."""

    KIND: ClassVar[str] = "metal"
    TYPE: ClassVar[int] = 8  # DLPack's kDLMetal

    memory_bytes: int

    @property
    def in_host_memory(self) -> bool:
        return True

    def free_memory(self) -> FreeMemory:
        """The chip's memory is the host's, and Metal does not report its use."""
        return min(FreeMemory(self.memory_bytes), free_memory())

    def best_target(self) -> str:
        """The target for this chip, `metal-m2-max` for an Apple M2 Max, or `metal`."""
        wanted = "-".join(["metal", *self.name.lower().split()[1:]])
        return wanted if wanted in target_names() else "metal"

    def weights(self, array: NDArray[Any]) -> Any:
        made = tvm_runtime.empty(array.shape, array.dtype.name, self.handle)
        # In parts, each waited for: TVM would keep staging buffers as large as the largest 64 weights.
        source, number = to_tvm(array), tvm_ffi.dtype("uint8")
        view = tvm_runtime.function("runtime.TVMTensorCreateView")
        for begin in range(0, array.nbytes, STAGED_BYTES):
            shape = tvm_ffi.Shape((min(STAGED_BYTES, array.nbytes - begin),))
            tvm_runtime.copy(view(source, shape, number, begin), view(made, shape, number, begin))
            tvm_runtime.wait_for(self.handle)
        return made

    def facts(self) -> tuple[str, ...]:
        sizes = f"{byte_size(self.memory_bytes)} memory, {byte_size(self.free_memory().nbytes)} free"
        return sizes, f"compile with --target {self.best_target()}", "untried on any GPU"

    def errors(self) -> AbstractContextManager[None]:
        return errors()


def devices() -> tuple[Device, ...]:
    """All devices. Raises TargetError except on a Mac with Apple's chip, or without a device."""
    load()
    found = []
    for index in tvm_devices.indices(Device.TYPE, _MAX_DEVICES):
        memory = tvm_devices.attribute(Device.TYPE, index, tvm_devices.TOTAL_MEMORY)
        found.append(Device(index, cpu_model(), int(memory)))
    if not found:
        raise TargetError("there is no Metal device", next_step="log in on the Mac itself")
    return tuple(found)


def hardware() -> str:
    """Raises TargetError: the user decides to try what has run on no Mac."""
    raise TargetError("mlcpipe's kernels have not run on a Mac's GPU yet", next_step="--device metal tries them")


def choose(spec: str | None = None) -> Device:
    """The device that `--device` names, None the first. Raises UsageError, and TargetError where there is none."""
    return base.choose_from("metal", spec, devices)


def findings() -> Iterator[Finding]:
    """All devices."""
    yield from (device.finding() for device in devices())


@functools.cache
def load() -> None:
    """Make `metal:i` devices of TVM in this process. Raises TargetError naming what is missing."""
    if sys.platform != "darwin" or platform.machine() != "arm64":
        raise TargetError(
            "Metal needs macOS on a Mac with Apple's chip",
            found=f"{sys.platform} {platform.machine()}",
            next_step="run the bundle there, or compile the model with --target cpu or vulkan",
        )
    tvm_runtime.load()
    tvm_devices.load_library("metal", "Metal", "mlcpipe doctor says what to install")


def errors() -> AbstractContextManager[None]:
    """Converts errors of TVM's Metal runtime inside: out of memory to ResourceError, others to TargetError."""
    return base.converted_errors(lambda error: tvm_devices.convert_error(error, "Metal", _OF_METAL, _NO_MEMORY))
