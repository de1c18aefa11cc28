"""Metal devices of a Mac, through TVM's Metal runtime, which comes in its wheel for macOS. Not yet run on hardware.

What is relied on is in TVM's src/backend/metal/runtime: it describes a device by little more than the memory that Metal
recommends for it, compiles a kernel's source when it is first called, and copies to a device through staging buffers,
of which it keeps up to 64 of any size until the device has been waited for.
"""

from __future__ import annotations

import functools
import importlib.util
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from tvm_ffi.libinfo import load_lib_ctypes

from mlcpipe.errors import MlcpipeError, ResourceError, TargetError, UsageError
from mlcpipe.runtime import tvm_runtime

DEVICE_TYPE = 8  # DLPack's kDLMetal
_MOST_DEVICES = 32  # of TVM's runtime
# DeviceAttrKind of TVM's device_api.h
_EXISTS, _TOTAL_MEMORY = 0, 14
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
    for index in range(_MOST_DEVICES):
        if not _attribute(index, _EXISTS):
            break
        found.append(Device(index, chip(), int(_attribute(index, _TOTAL_MEMORY))))
    if not found:
        raise TargetError("there is no Metal device", next_step="log in on the Mac itself")
    return tuple(found)


def choose(spec: str | None = None) -> Device:
    """The device that `--device` names: `metal` or None takes the first, `metal:1` the second.

    Raises UsageError for another word or a number that no device has, TargetError where there is none.
    """
    match = re.fullmatch(r"metal(?::(\d{1,4}))?", spec or "metal")
    if match is None:
        raise UsageError("the device cannot be used", expected="metal or metal:0, metal:1, ...", found=repr(spec)[:80])
    found, index = devices(), int(match[1] or 0)
    if index >= len(found):
        names = ", ".join(f"{device.spec} {device.name}" for device in found)
        raise UsageError(f"there is no device metal:{index}", expected=names)
    return found[index]


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
    spec = importlib.util.find_spec("tvm")
    folder = Path(str(spec.origin)).parent / "lib" if spec is not None else Path()
    try:
        load_lib_ctypes("tvm", "tvm_runtime_metal", "RTLD_LOCAL", [folder])
    except (OSError, RuntimeError) as error:
        raise TargetError(
            "TVM's Metal runtime does not load",
            found=str(error).strip().splitlines()[0][:200],
            next_step="mlcpipe doctor says what to install",
        ) from error


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


@contextmanager
def errors() -> Iterator[None]:
    """Turns what TVM's Metal runtime says into errors of ours: no memory is ResourceError, all else TargetError."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        text = " ".join(str(error).split())
        if isinstance(error, MlcpipeError) or not any(word in text for word in _OF_METAL):
            raise
        found = (str(error).strip().splitlines() or [text])[-1][:300]
        if isinstance(error, MemoryError) or any(word in text for word in _NO_MEMORY):
            raise ResourceError("the GPU has not enough memory", found=found) from error
        raise TargetError("Metal failed", found=found) from error


def _attribute(index: int, which: int) -> Any:
    return tvm_runtime.function("runtime.GetDeviceAttr")(DEVICE_TYPE, index, which)
