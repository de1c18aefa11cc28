"""Where a model runs: on the CPU, in memory that the host sees, or on a GPU, in memory of its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import psutil
import tvm_ffi
from numpy.typing import NDArray
from tvm_ffi import Shape

from mlcpipe.bundle import to_tvm
from mlcpipe.bundle.manifest import VariantInfo
from mlcpipe.env import env
from mlcpipe.errors import BundleError, TargetError, UsageError
from mlcpipe.runtime import cuda, metal, self_test, tvm_runtime, vulkan
from mlcpipe.runtime.cuda_graph import Cudart, Graph, Steps

_STAGED_BYTES = 16 << 20


class Place(Protocol):
    """A device with the weights, the KV cache and the activations of a model."""

    @property
    def title(self) -> str:
        """For people: what it is."""

    def free_bytes(self) -> int:
        """Memory for weights and KV cache that nothing uses now."""

    def machine(self, executable: Any) -> Any:
        """A virtual machine whose tensors lie here."""

    def weights(self, array: NDArray[Any]) -> Any:
        """A tensor with the numbers of a mapped array, which it may be a view of."""

    def tensor(self, values: NDArray[Any]) -> Any:
        """A tensor with a copy of an array."""

    def put(self, tensor: Any, values: NDArray[Any]) -> None:
        """Replace the numbers of a tensor that `tensor` gave."""

    def read(self, tensor: Any) -> Any:
        """A tensor of the host with the numbers of one that kernels made; good until the next kernel."""

    def prepared(self, module: Any, threads: int) -> None:
        """Get ready to run the kernels of a module. Raises TargetError for a driver that computes nonsense."""

    def released(self, module: Any) -> None:
        """Give back what `prepared` made."""

    def steps(self) -> Steps | None:
        """What records decode steps, where launches are recorded."""

    def errors(self) -> AbstractContextManager[None]:
        """Inside, errors of the device are errors of `mlcpipe.errors`."""


class Cpu:
    """This machine's CPU."""

    title = "CPU"

    def free_bytes(self) -> int:
        return int(psutil.virtual_memory().available)

    def machine(self, executable: Any) -> Any:
        return tvm_runtime.virtual_machine(executable)

    def weights(self, array: NDArray[Any]) -> Any:
        return to_tvm(array)

    def tensor(self, values: NDArray[Any]) -> Any:
        return tvm_runtime.tensor(values)

    def put(self, tensor: Any, values: NDArray[Any]) -> None:
        tvm_runtime.array(tensor)[...] = values

    def read(self, tensor: Any) -> Any:
        return tensor

    def prepared(self, module: Any, threads: int) -> None:
        return

    def released(self, module: Any) -> None:
        return

    def steps(self) -> None:
        return None

    def errors(self) -> AbstractContextManager[None]:
        return nullcontext()


class _DeviceMemory:
    """Tensors in the memory of one device: `where` is DLPack's type and number of it."""

    @property
    def where(self) -> tuple[int, int]:
        raise NotImplementedError

    @property
    def at(self) -> Any:
        """TVM's name of it."""
        return tvm_ffi.device(*self.where)

    def machine(self, executable: Any) -> Any:
        return tvm_runtime.virtual_machine(executable, self.where)

    def prepared(self, module: Any, threads: int) -> None:
        return

    def released(self, module: Any) -> None:
        return

    def steps(self) -> Steps | None:
        return None

    def weights(self, array: NDArray[Any]) -> Any:
        made = self._empty(array)
        tvm_runtime.function("runtime.TVMTensorCopyFromTo")(to_tvm(array), made)
        return made

    def tensor(self, values: NDArray[Any]) -> Any:
        made = self._empty(values)
        self.put(made, values)
        return made

    def _empty(self, like: NDArray[Any]) -> Any:
        return tvm_runtime.function("runtime.TVMTensorAllocWithScope")(
            Shape(like.shape), tvm_ffi.dtype(like.dtype.name), self.at, None
        )

    def put(self, tensor: Any, values: NDArray[Any]) -> None:
        # Not TVMTensorCopyFromBytes, which waits for the device. Our plugin has read the array when this returns; so
        # has CUDA, where the array is not page-locked (CUDA runtime API, API synchronization behavior).
        source = tvm_ffi.from_dlpack(np.ascontiguousarray(values))
        tvm_runtime.function("runtime.TVMTensorCopyFromTo")(source, tensor)

    def read(self, tensor: Any) -> Any:
        host = tvm_runtime.tensor(np.empty(tensor.shape, str(tensor.dtype)))
        tvm_runtime.function("runtime.TVMTensorCopyFromTo")(tensor, host)
        return host


@dataclass(frozen=True)
class Gpu(_DeviceMemory):
    """A Vulkan device."""

    device: vulkan.Device

    @property
    def where(self) -> tuple[int, int]:
        return vulkan.DEVICE_TYPE, self.device.index or 0

    @property
    def title(self) -> str:
        return f"{self.device.spec}, {self.device.title}, {self.device.kind}"

    def free_bytes(self) -> int:
        free = next(d for d in vulkan.devices() if d.index == self.device.index).free_bytes
        # What shares the host's memory cannot have more than the host has, whatever its driver says.
        return min(free, Cpu().free_bytes()) if self.device.unified_memory else free

    def prepared(self, module: Any, threads: int) -> None:
        with vulkan.naming_target(self.device):
            self_test.check(module, self.device)
            vulkan.prepare(module, self.device, threads)

    def released(self, module: Any) -> None:
        vulkan.release(module, self.device)

    def errors(self) -> AbstractContextManager[None]:
        return vulkan.errors()


@dataclass(frozen=True)
class CudaGpu(_DeviceMemory):
    """A CUDA device."""

    device: cuda.Device

    @property
    def where(self) -> tuple[int, int]:
        return cuda.DEVICE_TYPE, self.device.index

    @property
    def title(self) -> str:
        return f"{self.device.spec}, {self.device.title}"

    def free_bytes(self) -> int:
        return self.device.free_bytes()

    def read(self, tensor: Any) -> Any:
        host = super().read(tensor)
        tvm_runtime.function("runtime.Device_StreamSync")(self.at, 0)
        return host

    def steps(self) -> Steps | None:
        return Steps(Graph(Cudart(cuda.cudart()), self.device.index)) if env().cuda_graphs else None

    def errors(self) -> AbstractContextManager[None]:
        return cuda.errors()


@dataclass(frozen=True)
class MetalGpu(_DeviceMemory):
    """A Metal device of a Mac. Not yet run on hardware."""

    device: metal.Device

    @property
    def where(self) -> tuple[int, int]:
        return metal.DEVICE_TYPE, self.device.index

    @property
    def title(self) -> str:
        return f"{self.device.spec}, {self.device.name}"

    def free_bytes(self) -> int:
        return self.device.free_bytes()

    def weights(self, array: NDArray[Any]) -> Any:
        made = self._empty(array)
        # In parts, each waited for: TVM would keep staging buffers as large as the largest 64 weights.
        source, number = to_tvm(array), tvm_ffi.dtype("uint8")
        view, copy, wait = map(
            tvm_runtime.function,
            ("runtime.TVMTensorCreateView", "runtime.TVMTensorCopyFromTo", "runtime.Device_StreamSync"),
        )
        for begin in range(0, array.nbytes, _STAGED_BYTES):
            shape = Shape((min(_STAGED_BYTES, array.nbytes - begin),))
            copy(view(source, shape, number, begin), view(made, shape, number, begin))
            wait(self.at, 0)
        return made

    def errors(self) -> AbstractContextManager[None]:
        return metal.errors()


def place_for(variant: VariantInfo, wanted: str | None) -> Place:
    """Where the code of a variant runs: `wanted` is what `--device` said.

    Raises UsageError for a device that the code is not for, TargetError where there is none that it is for.
    """
    kind = _kind(variant)
    if kind == "llvm":
        if wanted not in (None, "cpu"):
            raise UsageError(
                "the bundle runs on the CPU", expected="--device cpu", found=repr(wanted)[:80],
                next_step="compile the model with --target vulkan",
            )  # fmt: skip
        return Cpu()
    if kind not in _DEVICES:
        raise TargetError(f"the bundle is for {kind}, which nothing here runs", next_step="compile the model again")
    title, open_place = _DEVICES[kind]
    if wanted is not None and wanted.partition(":")[0] in ("cpu", *_DEVICES) and wanted.partition(":")[0] != kind:
        raise UsageError(
            f"the bundle runs on {title}", expected=f"--device {kind}:0", found=repr(wanted)[:80].strip("'"),
            next_step=f"compile the model with --target {wanted.partition(':')[0]}",
        )  # fmt: skip
    return open_place(variant, wanted)


def _vulkan_place(variant: VariantInfo, wanted: str | None) -> Place:
    return Gpu(vulkan.choose(wanted))


def _cuda_place(variant: VariantInfo, wanted: str | None) -> Place:
    device = cuda.choose(wanted)
    cuda.check_architecture(device, str(json.loads(variant.tvm_target).get("arch", "")))
    return CudaGpu(device)


def _metal_place(variant: VariantInfo, wanted: str | None) -> Place:
    return MetalGpu(metal.choose(wanted))


_DEVICES: Mapping[str, tuple[str, Callable[[VariantInfo, str | None], Place]]] = {
    "vulkan": ("a Vulkan device", _vulkan_place),
    "cuda": ("a CUDA device", _cuda_place),
    "metal": ("a Mac's GPU", _metal_place),
}


def _kind(variant: VariantInfo) -> str:
    """TVM's word for what a variant's code runs on."""
    try:
        return str(json.loads(variant.tvm_target)["kind"])
    except (ValueError, KeyError, TypeError):
        raise BundleError("the manifest names no kind of target", found=variant.tvm_target[:80]) from None
