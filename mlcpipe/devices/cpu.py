"""This machine's CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

from numpy.typing import NDArray

from mlcpipe.bundle import to_tvm
from mlcpipe.devices import base
from mlcpipe.devices.support import tvm_runtime
from mlcpipe.host import cpu_features
from mlcpipe.host.cpu import cpu_model, kernel_features
from mlcpipe.host.finding import Finding, byte_size
from mlcpipe.host.memory import FreeMemory, free_memory
from mlcpipe.support.defaults import DEFAULT_TARGET
from mlcpipe.support.env import env
from mlcpipe.targets import host_variants, load_target

TVM_KIND, TITLE = "llvm", "the CPU"


@dataclass(frozen=True)
class Device(base.Device):
    """The CPU: tensors are the host's, and mapped weights are used in place."""

    KIND: ClassVar[str] = "cpu"
    TYPE: ClassVar[int] = 1  # DLPack's kDLCPU
    on_host: ClassVar[bool] = True

    @property
    def description(self) -> str:
        return "CPU"

    def free_memory(self) -> FreeMemory:
        return free_memory()

    def best_target(self) -> str:
        return "cpu-native"

    def facts(self) -> tuple[str, ...]:
        return (f"{byte_size(self.free_memory().nbytes)} free",)

    def errors(self) -> AbstractContextManager[None]:
        return base.converted_errors(lambda error: None)

    def virtual_machine(self, executable: Any) -> Any:
        return tvm_runtime.virtual_machine(executable)

    def weights(self, array: NDArray[Any]) -> Any:
        return to_tvm(array)

    def tensor(self, values: NDArray[Any]) -> Any:
        return tvm_runtime.tensor(values)

    def put(self, tensor: Any, values: NDArray[Any]) -> None:
        tvm_runtime.array(tensor)[...] = values

    def read(self, tensor: Any) -> Any:
        return tensor


def devices() -> tuple[Device, ...]:
    """The only device: the CPU."""
    return (Device(0, cpu_model()),)


def choose(spec: str | None = None) -> Device:
    """The CPU. Raises UsageError for any word but `cpu`."""
    return base.choose_from("cpu", spec, devices)


def findings() -> Iterator[Finding]:
    """The processor, and its variant of a bundle's kernels."""
    yield Finding("cpu", "note", f"{cpu_model()}: {' '.join(kernel_features()) or 'features unknown'}")
    yield from _variants()


def _variants() -> Iterator[Finding]:
    """This CPU's variant of a bundle's kernels, and the features it lacks for better ones."""
    variants, here = host_variants(load_target(DEFAULT_TARGET)), cpu_features.host_features()
    best = next((variant for variant in variants if here.issuperset(variant.features)), None)
    if best is None:
        yield Finding("cpu variant", "missing", f"mlcpipe has no kernels for {cpu_features.architecture()}")
        return
    better = variants[: variants.index(best)]
    lacks = "; ".join(f"{v.name} needs {' '.join(f for f in v.features if f not in here)}" for v in better)
    others = ", ".join(v.name for v in variants if v not in (best, *better))
    parts = [
        best.name,
        f"better ones: {lacks}" if lacks else "the best there is",
        f"also runs {others}" if others else "",
    ]
    yield Finding("cpu variant", "note", "; ".join(part for part in parts if part))
    if (wanted := env().cpu_variant) is not None:
        runs = any(v.name == wanted and here.issuperset(v.features) for v in variants)
        advice = "" if runs else "unset MLCPIPE_CPU_VARIANT"
        yield Finding("MLCPIPE_CPU_VARIANT", "note" if runs else "broken", f"asks for {wanted}", advice)
