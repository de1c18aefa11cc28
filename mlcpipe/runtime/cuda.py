"""CUDA devices of this machine, through TVM's CUDA runtime, which comes in its wheel for Linux and Windows."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import re
import sys
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlcpipe.errors import TargetError
from mlcpipe.runtime import tvm_devices, tvm_runtime

DEVICE_TYPE = 2  # DLPack's kDLCUDA
_MOST_DEVICES = 64
# TVM's runtime is linked with CUDA 13's, which NVIDIA's package for Python puts in nvidia/cu13; drivers have the other.
_CUDART = {
    "linux": ("libcudart.so.13", "lib/libcudart.so.13"),
    "win32": ("cudart64_13.dll", "bin/x86_64/cudart64_13.dll"),
}
_DRIVER = {"linux": "libcuda.so.1", "win32": "nvcuda.dll"}
_ADVICE = "install NVIDIA's driver 580 or newer"


@dataclass(frozen=True)
class Device:
    """A device as CUDA describes it: `capability` is its compute capability, "8.6", memory is in bytes."""

    index: int
    name: str
    capability: str
    memory_bytes: int

    @property
    def spec(self) -> str:
        """What `--device` takes for it."""
        return f"cuda:{self.index}"

    @property
    def title(self) -> str:
        """Name and capability, as error messages have them."""
        return f"{self.name} [compute capability {self.capability}]"

    def free_bytes(self) -> int:
        """Memory that nothing uses now."""
        return int(_attribute(self.index, tvm_devices.FREE_MEMORY))


def devices() -> tuple[Device, ...]:
    """All devices. Raises TargetError, in words, without a driver, CUDA's runtime library or a device."""
    load()
    found = []
    for index in tvm_devices.indices(DEVICE_TYPE, _MOST_DEVICES):
        memory = int(_attribute(index, tvm_devices.TOTAL_MEMORY))
        known = (tvm_devices.COMPUTE_VERSION, tvm_devices.NAME)
        capability, name = (str(_attribute(index, which)) for which in known)
        found.append(Device(index, name, capability, memory))
    if not found:
        raise TargetError("there is no CUDA device", next_step=f"nvidia-smi says what the driver sees; {_ADVICE}")
    return tuple(found)


def choose(spec: str | None = None) -> Device:
    """The device that `--device` names, as `tvm_devices.chosen` has it. Raises TargetError where there is none."""
    return tvm_devices.chosen("cuda", spec, devices)


def check_architecture(device: Device, architecture: str) -> None:
    """Raises TargetError where a device cannot run code that was made for an architecture such as sm_80 and later."""
    wanted = re.fullmatch(r"sm_(\d+)(\d)[a-z]?", architecture)
    if wanted and _numbers(device.capability) < (int(wanted[1]), int(wanted[2])):
        raise TargetError(
            "the bundle was made for newer GPUs",
            expected=f"compute capability {wanted[1]}.{wanted[2]} or more",
            found=device.title,
            next_step="compile the model again with --target cuda",
        )


def _numbers(capability: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", capability))


@functools.cache
def load() -> None:
    """Make `cuda:i` devices of TVM in this process. Raises TargetError that says what is missing."""
    if sys.platform not in _CUDART:
        raise TargetError("TVM has no CUDA runtime for this system", expected="Linux or Windows", found=sys.platform)
    tvm_runtime.load()
    try:
        ctypes.CDLL(_DRIVER[sys.platform])
    except OSError as error:
        raise TargetError("there is no NVIDIA driver", found=str(error)[:200], next_step=_ADVICE) from error
    cudart()
    tvm_devices.load_library("cuda", "CUDA", _ADVICE)


@functools.cache
def cudart() -> Any:
    """CUDA's runtime library, the system's or that of NVIDIA's package, where TVM's finds it. Raises TargetError."""
    name, inside = _CUDART[sys.platform]
    nvidia = importlib.util.find_spec("nvidia")
    folders = nvidia.submodule_search_locations if nvidia is not None else None
    for path in (name, *(str(Path(folder, "cu13", inside)) for folder in folders or ())):
        try:
            return ctypes.CDLL(path, ctypes.RTLD_GLOBAL)
        except OSError:
            continue
    raise TargetError("CUDA's runtime library is missing", expected=name, next_step="pip install 'mlcpipe[cuda]'")


def errors() -> AbstractContextManager[None]:
    """Turns what CUDA says into errors of ours: no memory is ResourceError, all else TargetError."""
    return tvm_devices.errors("CUDA", ("CUDA",), ("out of memory", "OUT_OF_MEMORY"), _ADVICE)


def _attribute(index: int, which: int) -> Any:
    return tvm_devices.attribute(DEVICE_TYPE, index, which)
