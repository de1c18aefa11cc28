"""Shared by all kinds of device: a device with its tensors, the choice by `--device`, and the mapping of errors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np
import tvm_ffi
from numpy.typing import NDArray

from mlcpipe.bundle import to_tvm
from mlcpipe.devices.support import tvm_runtime
from mlcpipe.devices.support.step_recorder import StepRecorder
from mlcpipe.errors import MlcpipeError, UsageError, no_memory
from mlcpipe.host.finding import Finding
from mlcpipe.host.memory import FreeMemory


@dataclass(frozen=True)
class Device:
    """A device that can hold the weights, the KV cache and the activations of a model.

    `KIND` is its module's name, `TYPE` its number in DLPack. `name` is the maker's, `index` the i of `cuda:i`.
    The methods with tensors are for a device with its own memory.
    """

    KIND: ClassVar[str]
    TYPE: ClassVar[int]
    on_host: ClassVar[bool] = False

    index: int
    name: str

    @property
    def spec(self) -> str:
        """Its value for `--device`."""
        return f"{self.KIND}:{self.index}"

    @property
    def identity(self) -> tuple[str, ...]:
        """Words that tell the device and its driver from others."""
        return (self.name,)

    @property
    def title(self) -> str:
        """Its name for error messages."""
        return self.name

    @property
    def description(self) -> str:
        """Its name for the start of a chat."""
        return f"{self.spec}, {self.title}"

    @property
    def record_name(self) -> str:
        """Its name in tuning records."""
        return record_name(self.name)

    @property
    def is_hardware(self) -> bool:
        """Whether it is a device of its own, not a driver that computes on the CPU."""
        return True

    @property
    def in_host_memory(self) -> bool:
        """Whether its memory is the host's, so that what one takes the other lacks."""
        return self.on_host

    def free_memory(self) -> FreeMemory:
        """Free memory for weights and KV cache."""
        raise NotImplementedError

    @property
    def max_tensor_bytes(self) -> int:
        """The most bytes of a tensor: kernels count them with 32 bits."""
        return (1 << 31) - 1

    def best_target(self) -> str:
        """The best target for it."""
        raise NotImplementedError

    def finding(self) -> Finding:
        """The device for `mlcpipe doctor`."""
        return Finding(self.spec, "ok", "; ".join((self.title, *self.facts())))

    def facts(self) -> tuple[str, ...]:
        """Its description for people: memory, features, the best target."""
        raise NotImplementedError

    def errors(self) -> AbstractContextManager[None]:
        """Converts errors of the device inside to those of `mlcpipe.errors`."""
        raise NotImplementedError

    def check_code(self, tvm_target: Mapping[str, Any]) -> None:
        """Raises TargetError if the device cannot run the code of a target of its kind."""

    def prepare(self, module: Any, threads: int) -> None:
        """Get ready to run the kernels of a module. Raises TargetError for a driver that computes wrong numbers."""

    def release(self, module: Any) -> None:
        """Release what `prepare` made."""

    def step_recorder(self) -> StepRecorder:
        """The launcher of a model's decode steps."""
        return StepRecorder()

    @property
    def handle(self) -> Any:
        """TVM's object for it."""
        return tvm_ffi.device(self.TYPE, self.index)

    def virtual_machine(self, executable: Any) -> Any:
        """A virtual machine with tensors on the device."""
        return tvm_runtime.virtual_machine(executable, (self.TYPE, self.index))

    def weights(self, array: NDArray[Any]) -> Any:
        """A tensor with the numbers of a mapped array, possibly a view of it."""
        made = tvm_runtime.empty(array.shape, array.dtype.name, self.handle)
        tvm_runtime.copy(to_tvm(array), made)
        return made

    def tensor(self, values: NDArray[Any]) -> Any:
        """A tensor with a copy of an array."""
        made = tvm_runtime.empty(values.shape, values.dtype.name, self.handle)
        self.put(made, values)
        return made

    def put(self, tensor: Any, values: NDArray[Any]) -> None:
        """Replace the numbers of a tensor from `tensor`."""
        # Not TVMTensorCopyFromBytes, which waits for the device. Our plugin has read the array when this returns; so
        # has CUDA, where the array is not page-locked (CUDA runtime API, API synchronization behavior).
        tvm_runtime.copy(tvm_ffi.from_dlpack(np.ascontiguousarray(values)), tensor)

    def read(self, tensor: Any) -> Any:
        """A host tensor with the numbers of a kernel's result, valid until the next kernel."""
        host = tvm_runtime.tensor(np.empty(tensor.shape, str(tensor.dtype)))
        tvm_runtime.copy(tensor, host)
        return host


class Reused:
    """Numbers that each step replaces: one tensor of a device, which grows as needed."""

    def __init__(self, device: Device, dtype: str) -> None:
        self._device, self.dtype = device, dtype
        self._tensor = tvm_runtime.empty((64,), dtype, device.handle)
        self._shape: tuple[int, ...] = ()
        self._view: Any = None

    def put(self, values: NDArray[Any]) -> Any:
        """A tensor with these numbers until the next call; the same object while their shape is the same."""
        if values.shape != self._shape:
            if values.size > self._tensor.shape[0]:
                self._tensor = tvm_runtime.empty(
                    (1 << (values.size - 1).bit_length(),), self.dtype, self._device.handle
                )
            self._shape = ()  # in case Ctrl-C interrupts the following lines
            self._view = tvm_runtime.view(self._tensor, values.shape)
            self._shape = values.shape
        self._device.put(self._view, values)
        return self._view


def record_name(name: str) -> str:
    """A device's name as tuning records have it: printable characters."""
    return " ".join("".join(c if c.isprintable() else " " for c in name).split())[:200]


class Kind(Protocol):
    """A kind's module. One for browsers also names their usual target in `BROWSER_TARGET`.

    One of GPUs also has `GPUS_OF`, the values of sys.platform where it may be.
    """

    TVM_KIND: str  # of TVM's targets
    TITLE: str  # for people, after "the bundle runs on"

    def devices(self) -> Sequence[Device]:
        """All devices, best first. Raises TargetError that says what is missing."""

    def findings(self) -> Iterable[Finding]:
        """The lines of `mlcpipe doctor`. Raises TargetError as `devices` does."""

    def hardware(self) -> str:
        """Only of kinds with `GPUS_OF`: the GPUs and their driver as the system shows them at once, "" for none.

        Nothing is loaded or compiled for that. Raises TargetError where `auto` takes no such GPU.
        """

    def choose(self, spec: str | None = None) -> Device:
        """The device that `--device` names, None the first. Raises UsageError, and TargetError if there is none."""


D = TypeVar("D", bound=Device)


def choose_from(kind: str, spec: str | None, devices: Callable[[], Sequence[D]]) -> D:
    """The device that `--device` names: `cuda` or None is the first, `cuda:1` the second.

    Raises UsageError for an unknown word or number, and what `devices` raises.
    """
    match = re.fullmatch(rf"{kind}(?::(\d{{1,4}}))?", spec or kind)
    if match is None:
        expected = f"{kind} or {kind}:0, {kind}:1, ..."
        raise UsageError("the device cannot be used", expected=expected, found=repr(spec)[:80])
    found, index = devices(), int(match[1] or 0)
    if index >= len(found):
        names = ", ".join(f"{device.spec} {device.name}" for device in found)
        raise UsageError(f"there is no device {kind}:{index}", expected=names)
    return found[index]


@contextmanager
def converted_errors(convert: Callable[[Exception], MlcpipeError | None]) -> Iterator[None]:
    """Converts TVM's errors inside by `convert`, or to ResourceError if the host has no memory.

    Others pass unchanged.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        ours = convert(error) or no_memory(error)
        if ours is None:
            raise
        raise ours from error
