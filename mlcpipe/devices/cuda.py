"""CUDA devices of this machine, through TVM's CUDA runtime, which comes in its wheel for Linux and Windows."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from ctypes.util import find_library
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from mlcpipe.devices import base
from mlcpipe.devices.support import tvm_devices, tvm_runtime
from mlcpipe.devices.support.cuda_graph import Cudart, Graph, GraphRecorder
from mlcpipe.devices.support.step_recorder import StepRecorder
from mlcpipe.errors import TargetError
from mlcpipe.host.finding import Finding, byte_size
from mlcpipe.host.memory import FreeMemory
from mlcpipe.host.proc import system_text
from mlcpipe.support.env import env
from mlcpipe.targets import load_targets

TVM_KIND, TITLE = "cuda", "a CUDA device"
GPUS_OF = ("linux", "win32")  # values of sys.platform
_MAX_DEVICES = 64
# TVM's runtime is linked with CUDA 13's, which NVIDIA's Python package puts into nvidia/cu13; the driver has libcuda.
_CUDART = {
    "linux": ("libcudart.so.13", "lib/libcudart.so.13"),
    "win32": ("cudart64_13.dll", "bin/x86_64/cudart64_13.dll"),
}
_DRIVER = {"linux": "libcuda.so.1", "win32": "nvcuda.dll"}
_ADVICE = "install NVIDIA's driver 580 or newer"
# What only NVIDIA's driver makes: on PCs, on Jetson, in the Linux of Windows.
_SIGNS = ("dev/nvidiactl", "dev/nvhost-gpu", "usr/lib/wsl/lib/libcuda.so.1")
_ABOUT = ("version", "gpus/*/information")  # of proc/driver/nvidia
_OF_CUDA, _NO_MEMORY = ("CUDA",), ("out of memory", "OUT_OF_MEMORY")


@dataclass(frozen=True)
class Device(base.Device):
    """A device as CUDA describes it: `capability` is its compute capability, "8.6", memory is in bytes."""

    KIND: ClassVar[str] = "cuda"
    TYPE: ClassVar[int] = 2  # DLPack's kDLCUDA

    capability: str
    memory_bytes: int

    @property
    def title(self) -> str:
        return f"{self.name} [compute capability {self.capability}]"

    def free_memory(self) -> FreeMemory:
        return FreeMemory(int(tvm_devices.attribute(self.TYPE, self.index, tvm_devices.FREE_MEMORY)))

    def best_target(self) -> str:
        """The target for the newest architecture that the device runs; else `cuda`, which is for several."""
        targets = [target for target in load_targets(self.KIND) if len(target.architectures) == 1]
        known = {_numbers_of(target.architectures[0]): target.name for target in targets}
        return known[max(usable)] if (usable := [one for one in known if one <= self._numbers]) else "cuda"

    def check_code(self, tvm_target: Mapping[str, Any]) -> None:
        architecture = str(tvm_target.get("arch", ""))
        if self._numbers < _numbers_of(architecture):
            major, minor = _numbers_of(architecture)
            raise TargetError(
                "the bundle was made for newer GPUs",
                expected=f"compute capability {major}.{minor} or more",
                found=self.title,
                next_step="compile the model again with --target cuda",
            )

    @property
    def _numbers(self) -> tuple[int, ...]:
        return tuple(int(number) for number in re.findall(r"\d+", self.capability))

    def read(self, tensor: Any) -> Any:
        host = super().read(tensor)
        tvm_runtime.wait_for(self.handle)
        return host

    def step_recorder(self) -> StepRecorder:
        return GraphRecorder(Graph(Cudart(cudart()), self.index), enabled=env().cuda_graphs)

    def facts(self) -> tuple[str, ...]:
        sizes = f"{byte_size(self.memory_bytes)} memory, {byte_size(self.free_memory().nbytes)} free"
        return sizes, f"compile with --target {self.best_target()}"

    def errors(self) -> AbstractContextManager[None]:
        return errors()


def _numbers_of(architecture: str) -> tuple[int, ...]:
    """sm_90 is (9, 0); () for anything else."""
    match = re.fullmatch(r"sm_(\d+)(\d)[a-z]?", architecture)
    return (int(match[1]), int(match[2])) if match else ()


def devices() -> tuple[Device, ...]:
    """All devices. Raises TargetError without a driver, CUDA's runtime library or a device."""
    load()
    found = []
    for index in tvm_devices.indices(Device.TYPE, _MAX_DEVICES):
        name, capability, memory = (
            tvm_devices.attribute(Device.TYPE, index, which)
            for which in (tvm_devices.NAME, tvm_devices.COMPUTE_VERSION, tvm_devices.TOTAL_MEMORY)
        )
        found.append(Device(index, str(name), str(capability), int(memory)))
    if not found:
        raise TargetError("there is no CUDA device", next_step=f"nvidia-smi says what the driver sees; {_ADVICE}")
    return tuple(found)


def hardware(root: Path = Path("/")) -> str:
    """The driver and its GPUs. `root` is the folder that has dev and proc."""
    if sys.platform == "win32":
        return find_library("nvcuda") or ""
    found = [sign for sign in _SIGNS if (root / sign).exists()]
    texts = [path for name in _ABOUT for path in sorted((root / "proc/driver/nvidia").glob(name))] if found else []
    return "\n".join([*found, *map(system_text, texts)])


def choose(spec: str | None = None) -> Device:
    """The device that `--device` names, None the first. Raises UsageError, and TargetError where there is none."""
    return base.choose_from("cuda", spec, devices)


def findings() -> Iterator[Finding]:
    """All devices."""
    yield from (device.finding() for device in devices())


@functools.cache
def load() -> None:
    """Make `cuda:i` devices of TVM in this process. Raises TargetError naming what is missing."""
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
    """CUDA's runtime library, the system's or NVIDIA's package's, loaded for TVM to find. Raises TargetError."""
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
    """Converts errors of CUDA inside: out of memory to ResourceError, others to TargetError."""
    return base.converted_errors(lambda e: tvm_devices.convert_error(e, "CUDA", _OF_CUDA, _NO_MEMORY, _ADVICE))
