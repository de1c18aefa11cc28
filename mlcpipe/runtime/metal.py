"""Metal devices of a Mac, through TVM's Metal runtime, which comes in its wheel for macOS. Not yet run on hardware.

What is relied on is in TVM's src/backend/metal/runtime: it describes a device by little more than the memory that Metal
recommends for it, compiles a kernel's source when it is first called, and copies to a device through staging buffers,
of which it keeps up to 64 of any size until the device has been waited for.
"""

from __future__ import annotations

import functools
import platform
import subprocess
import sys
from contextlib import AbstractContextManager
from dataclasses import dataclass

import psutil

from mlcpipe.errors import TargetError
from mlcpipe.runtime import tvm_devices, tvm_runtime

DEVICE_TYPE = 8  # DLPack's kDLMetal
_MOST_DEVICES = 32  # of TVM's runtime
# What TVM's runtime says where Metal gives no buffer.
_NO_MEMORY = ("buf != nil", "Failed to allocate", "Insufficient Memory", "OutOfMemory")
_OF_METAL = ("metal", "Metal", "GPUError", "MTL", *_NO_MEMORY)


@dataclass(frozen=True)
class Device:
    """A device: `name` is the chip's, "Apple M2 Max"; `memory_bytes` is what Metal recommends to use at most."""

    index: int
    name: str
    memory_bytes: int

    @property
    def spec(self) -> str:
        """What `--device` takes for it."""
        return f"metal:{self.index}"

    def free_bytes(self) -> int:
        """Memory that nothing uses now: the chip's is the host's, and Metal does not say what it has given away."""
        return min(self.memory_bytes, int(psutil.virtual_memory().available))


def devices() -> tuple[Device, ...]:
    """All devices. Raises TargetError, in words, elsewhere than on a Mac with Apple's chip, or without a device."""
    load()
    found = []
    for index in tvm_devices.indices(DEVICE_TYPE, _MOST_DEVICES):
        memory = tvm_devices.attribute(DEVICE_TYPE, index, tvm_devices.TOTAL_MEMORY)
        found.append(Device(index, chip(), int(memory)))
    if not found:
        raise TargetError("there is no Metal device", next_step="log in on the Mac itself")
    return tuple(found)


def choose(spec: str | None = None) -> Device:
    """The device that `--device` names, as `tvm_devices.chosen` has it. Raises TargetError where there is none."""
    return tvm_devices.chosen("metal", spec, devices)


@functools.cache
def load() -> None:
    """Make `metal:i` devices of TVM in this process. Raises TargetError that says what is missing."""
    if sys.platform != "darwin" or platform.machine() != "arm64":
        raise TargetError(
            "Metal needs macOS on a Mac with Apple's chip",
            found=f"{sys.platform} {platform.machine()}",
            next_step="run the bundle there, or compile the model with --target cpu or vulkan",
        )
    tvm_runtime.load()
    tvm_devices.load_library("metal", "Metal", "mlcpipe doctor says what to install")


@functools.cache
def chip() -> str:
    """The name of a Mac's chip, whose GPU is the device: TVM's runtime does not tell names."""
    command = ("/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "Apple GPU"
    return done.stdout.strip() or "Apple GPU"


def suited_target(device: Device, names: list[str]) -> str:
    """The target of `names` that is for this chip, `metal-m2-max` for an Apple M2 Max, or `metal`."""
    wanted = "-".join(["metal", *device.name.lower().split()[1:]])
    return wanted if wanted in names else "metal"


def errors() -> AbstractContextManager[None]:
    """Turns what TVM's Metal runtime says into errors of ours: no memory is ResourceError, all else TargetError."""
    return tvm_devices.errors("Metal", _OF_METAL, _NO_MEMORY)
