"""Vulkan devices of this machine: what they are, which one is taken, their compiled kernels and counters."""

from __future__ import annotations

import atexit
import functools
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mlcpipe.errors import MlcpipeError, ResourceError, TargetError, UsageError
from mlcpipe.runtime import tvm_runtime, vulkan_plugin
from mlcpipe.targets import suited_target

DEVICE_TYPE = 7  # DLPack's kDLVulkan
_OF_ANOTHER_DEVICE = "; compile the model for this device"  # what the plugin says of a kernel at the end


@dataclass(frozen=True)
class Device:
    """A device as its driver describes it.

    `index` is i of `vulkan:i`, None where `problem` says why it cannot be used. `kind` is "discrete", "integrated",
    "virtual", "software" or "other". Sizes are in bytes; `limits` and `features` have the driver's numbers and names
    (see `mlcpipe/native/vulkan/globals.cc` and `adapter.cc`).
    """

    index: int | None
    name: str
    kind: str
    driver: str
    api_version: str
    driver_uuid: str
    vendor_id: int
    unified_memory: bool
    memory_bytes: int
    free_bytes: int
    limits: Mapping[str, Any]
    features: frozenset[str]
    problem: str

    @property
    def spec(self) -> str:
        """What `--device` takes for it."""
        return f"vulkan:{self.index}"

    @property
    def title(self) -> str:
        """Name and driver, as error messages have them."""
        return f"{self.name} [{self.driver}]" if self.driver else self.name


def devices() -> tuple[Device, ...]:
    """All devices, usable ones first, discrete before integrated before software: `vulkan:0` is the one to prefer.

    Raises TargetError where there is no Vulkan or no device at all, or the plugin cannot be compiled.
    """
    described = json.loads(function("describe")())
    if described["problem"]:
        raise TargetError(described["problem"], next_step=_driver_advice())
    usable = (index for index, _ in enumerate(described["devices"]))
    return tuple(_device(None if entry["problem"] else next(usable), entry) for entry in described["devices"])


def choose(spec: str | None = None) -> Device:
    """The device that `--device` names: `vulkan` or None takes the best, `vulkan:1` the second.

    Raises UsageError for another word or a number that no device has, TargetError where none can be used.
    """
    match = re.fullmatch(r"vulkan(?::(\d{1,4}))?", spec or "vulkan")
    if match is None:
        raise UsageError("the device cannot be used", expected="vulkan or vulkan:0, vulkan:1, ...", found=repr(spec))
    found = devices()
    usable = [device for device in found if device.index is not None]
    if not usable:
        reasons = "; ".join(f"{device.title}: {device.problem}" for device in found)
        raise TargetError("no Vulkan device can be used", found=reasons, next_step="update its driver")
    index = int(match[1] or 0)
    if index >= len(usable):
        names = ", ".join(f"{device.spec} {device.name}" for device in usable)
        raise UsageError(f"there is no device vulkan:{index}", expected=names)
    return usable[index]


def function(name: str) -> Any:
    """The plugin's function `mlcpipe.vulkan.<name>`. Raises TargetError where it cannot be compiled or loaded."""
    _start()
    return tvm_runtime.function(f"mlcpipe.vulkan.{name}")


def load() -> None:
    """Make `vulkan:i` a device of TVM in this process; `load_module` then reads bundles with kernels for it."""
    _start()


def prepare(module: Any, device: Device, threads: int) -> None:
    """Compile all kernels of a module for a device now, on several threads, instead of each at its first call.

    `module` is a runtime module of kind "vulkan" or one that imports some. Raises TargetError or ResourceError.
    """
    with errors():
        for part in _vulkan_parts(module):
            function("prepare")(part, device.index, threads)


def release(module: Any, device: Device) -> None:
    """What `prepare` made is not needed any more, unless somebody else prepared the same module."""
    for part in _vulkan_parts(module):
        function("release")(part, device.index)


@contextmanager
def naming_target(device: Device) -> Iterator[None]:
    """Inside, the refusal of a kernel that a device cannot run says which target it can."""
    try:
        yield
    except TargetError as error:
        what, found, _ = error.what.partition(_OF_ANOTHER_DEVICE)
        if not found:
            raise
        suited = suited_target(device.vendor_id, device.limits)
        raise TargetError(what, next_step=f"compile the model with --target {suited}") from error


def counts(device: Device) -> dict[str, int]:
    """What the plugin did on a device so far: dispatches, submits, barriers, buffers, pipelines, bytes."""
    return {str(name): int(count) for name, count in function("counts")(device.index).items()}


@contextmanager
def profiled(device: Device) -> Iterator[dict[str, tuple[int, float]]]:
    """Measures what runs on a device inside, one kernel after another: afterwards kernel -> (launches, seconds).

    Raises TargetError for a device without a clock.
    """
    times: dict[str, tuple[int, float]] = {}
    with errors():
        function("profile_start")(device.index)
        yield times
        for name, (calls, nanoseconds) in function("profile_stop")(device.index).items():
            times[str(name)] = int(calls), nanoseconds * 1e-9


def save_pipelines() -> str:
    """Write what the drivers compiled to the cache, for the next process. "" or why it could not be written."""
    return str(function("save_pipelines")())


@contextmanager
def errors() -> Iterator[None]:
    """Turns errors of the plugin into ours: no memory is ResourceError, all else TargetError. The process goes on."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        text = str(error).strip()
        if isinstance(error, MlcpipeError) or not text.startswith("vulkan: "):
            raise
        kind = ResourceError if isinstance(error, MemoryError) else TargetError
        raise kind(text.removeprefix("vulkan: ")) from error


@functools.cache
def _start() -> None:
    vulkan_plugin.load()
    # Drivers unload when the process ends: nothing may run on the device then.
    atexit.register(_finish)


def _finish() -> None:
    try:
        tvm_runtime.function("mlcpipe.vulkan.wait")()
        save_pipelines()
    except (RuntimeError, MemoryError):  # a device that was lost: there is nothing to save
        return


def _device(index: int | None, entry: Mapping[str, Any]) -> Device:
    driver = f"{entry['driver']} {entry['driver_info']}".strip()
    return Device(
        index=index,
        name=entry["name"],
        kind=entry["type"],
        driver=driver,
        api_version=entry["api_version"],
        driver_uuid=entry["driver_uuid"],
        vendor_id=entry["vendor_id"],
        unified_memory=entry["unified_memory"],
        memory_bytes=entry.get("memory_bytes", 0),
        free_bytes=entry.get("free_bytes", 0),
        limits=entry.get("limits", {}),
        features=frozenset(entry.get("features", ())),
        problem=entry["problem"],
    )


def _vulkan_parts(module: Any) -> Iterator[Any]:
    if module.kind == "vulkan":
        yield module
    for imported in module.imports:
        yield from _vulkan_parts(imported)


def _driver_advice() -> str:
    manager = vulkan_plugin.install_command().split()[0]
    package = {"apt-get": "mesa-vulkan-drivers libvulkan1", "dnf": "mesa-vulkan-drivers vulkan-loader"}
    if manager in package:
        return f"{manager} install {package[manager]}, or the driver of the GPU's maker"
    return "install the driver of the GPU"
