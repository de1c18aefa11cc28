"""Vulkan devices of this machine: descriptions, the best target of each, compiled kernels and counters."""

from __future__ import annotations

import atexit
import functools
import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from mlcpipe.devices import base
from mlcpipe.devices.support import driver_check, tvm_runtime, vulkan_plugin
from mlcpipe.errors import MlcpipeError, ResourceError, TargetError
from mlcpipe.host.finding import Finding, byte_size
from mlcpipe.host.memory import FreeMemory, free_memory
from mlcpipe.host.proc import system_text
from mlcpipe.targets import Target, load_targets

TVM_KIND, TITLE = "vulkan", "a Vulkan device"
GPUS_OF = ("linux",)  # values of sys.platform
# Features that make models faster or smaller -> their use.
_FEATURES = {
    "shaderFloat16": "float16",
    "shaderInt8": "int8",
    "subgroupArithmetic": "subgroup sums",
    "cooperativeMatrix": "cooperative matrices",
}
_NVIDIA = 0x10DE
# Nodes of kernel drivers for GPUs, folders of Vulkan's drivers, and those drivers that compute on the CPU.
_NODES = ("dri/renderD*", "nvidiactl", "dxg", "mali*", "kgsl-3d0")
_DRIVERS = ("usr/share", "usr/local/share", "etc", "run/opengl-driver/share")
_SOFTWARE = ("lvp_icd", "vk_swiftshader_icd")
_OF_ANOTHER_DEVICE = "; compile the model for this device"  # the end of the plugin's message about a kernel


@dataclass(frozen=True)
class Device(base.Device):
    """A device as its driver describes it.

    `index` is i of `vulkan:i`, -1 if unusable, with the reason in `problem`. `kind` is "discrete", "integrated",
    "virtual", "software" or "other". Sizes are in bytes; `limits` and `features` have the driver's numbers and names
    (see `mlcpipe/native/vulkan/globals.cc` and `adapter.cc`).
    """

    KIND: ClassVar[str] = "vulkan"
    TYPE: ClassVar[int] = 7  # DLPack's kDLVulkan

    kind: str
    driver: str
    api_version: str
    driver_uuid: str
    vendor_id: int
    unified_memory: bool
    memory_bytes: int
    limits: Mapping[str, Any]
    features: frozenset[str]
    problem: str

    @property
    def identity(self) -> tuple[str, ...]:
        return self.name, self.driver, self.driver_uuid, self.api_version

    @property
    def title(self) -> str:
        return f"{self.name} [{self.driver}]" if self.driver else self.name

    @property
    def description(self) -> str:
        return f"{self.spec}, {self.title}, {self.kind}"

    @property
    def in_host_memory(self) -> bool:
        return self.unified_memory

    def free_memory(self) -> FreeMemory:
        free = FreeMemory(int(_described()[self.index]["free_bytes"]))  # of VK_EXT_memory_budget, if the driver has it
        # A device in the host's memory cannot have more than the host has, whatever its driver says.
        return min(free, free_memory()) if self.unified_memory else free

    @property
    def is_hardware(self) -> bool:
        return self.kind in ("discrete", "integrated", "virtual")

    @property
    def max_tensor_bytes(self) -> int:
        return min(super().max_tensor_bytes, int(self.limits["max_buffer_bytes"]))

    def best_target(self) -> str:
        """The best target for the device's maker within its limits.

        Targets with cooperative matrices must be named by the user: of GPUs, only NVIDIA's have run them, and
        activations are float16.
        """
        suited = (t for t in load_targets(self.KIND) if self._suits(t) and not t.schedule.get("matrix_rows"))
        return next((target.name for target in suited), "vulkan")

    def matrix_target(self) -> str:
        """The target with cooperative matrices that the device can run, "" if none."""
        for target in load_targets(self.KIND):
            shape = "x".join(str(target.schedule.get(f"matrix_{key}", 0)) for key in ("rows", "columns", "depth"))
            if self._suits(target) and f"cooperativeMatrix{shape}" in self.features:
                return target.name
        return ""

    def _suits(self, target: Target) -> bool:
        """Whether a target is for the maker's devices and this machine, and within this device's limits."""
        if not target.vendor or target.vendor != self.vendor_id or "mtriple" in target.tvm.get("host", {}):
            return False
        lanes, need, limits = int(target.schedule.get("subgroup", 0)), target.limits, self.limits
        sizes = limits["min_subgroup_size"] <= lanes <= limits["max_subgroup_size"]
        enough = all(
            limits[theirs] >= need[ours]
            for theirs, ours in (
                ("max_threads", "max_invocations"),
                ("max_shared_memory_bytes", "max_shared_bytes"),
                ("max_buffer_bytes", "max_binding_bytes"),
            )
        )
        return enough and (not lanes or bool(sizes and limits["can_require_subgroup_size"]))

    def finding(self) -> Finding:
        if self.problem:
            return Finding("vulkan device", "broken", f"{self.title}: {self.problem}", "update its driver")
        return replace(super().finding(), state="note") if self.kind == "software" else super().finding()

    def facts(self) -> tuple[str, ...]:
        limits, matrices = self.limits, self.matrix_target()
        tried = "faster prompts, float16 activations" if self.vendor_id == _NVIDIA else "untried on such GPUs"
        subgroups = dict.fromkeys((limits["min_subgroup_size"], limits["max_subgroup_size"]))
        extras = [name for feature, name in _FEATURES.items() if feature in self.features]
        return (
            f"{self.kind}, Vulkan {self.api_version}",
            f"{byte_size(self.memory_bytes)} memory, {byte_size(self.free_memory().nbytes)} free",
            f"a tensor has at most {byte_size(limits['max_buffer_bytes'])}",
            f"{limits['max_threads']} threads share {byte_size(limits['max_shared_memory_bytes'])}",
            f"subgroups of {' to '.join(map(str, subgroups))}",
            f"has {', '.join(extras)}" if extras else "has no optional features",
            f"compile with --target {self.best_target()}",
            *([f"--target {matrices} uses its matrices: {tried}"] if matrices else []),
            f"taken by --device {self.spec}" if self.index else "preferred",
        )

    def prepare(self, module: Any, threads: int) -> None:
        with _naming_target(self):
            driver_check.check(module, self)
            prepare(module, self, threads)

    def release(self, module: Any) -> None:
        for part in _vulkan_parts(module):  # other users of the module keep theirs
            function("release")(part, self.index)

    def errors(self) -> AbstractContextManager[None]:
        return errors()


def devices() -> tuple[Device, ...]:
    """All devices, usable ones first, discrete before integrated before software: `vulkan:0` is the best.

    Raises TargetError without Vulkan or any device, or if there is no plugin.
    """
    return tuple(_device(-1 if entry["problem"] else index, entry) for index, entry in enumerate(_described()))


def hardware(root: Path = Path("/")) -> str:
    """The nodes of GPUs, and Vulkan's drivers with their dates. `root` is the folder that has dev, etc, sys and usr.

    What a driver's library needs is not looked into: where a GPU has no driver, its devices are software.
    Raises TargetError for a GPU where no driver is installed.
    """
    nodes = [node for name in _NODES for node in sorted((root / "dev").glob(name))]
    found = [file for folder in _DRIVERS for file in sorted((root / folder / "vulkan/icd.d").glob("*.json"))]
    drivers = [file for file in found if file.is_file() and not file.name.startswith(_SOFTWARE)]
    if not nodes:
        return ""
    if not drivers:
        raise TargetError("a GPU has no Vulkan driver", where=nodes[0], next_step=_driver_advice())
    ids = [root / "sys/class/drm" / node.name / "device" / name for node in nodes for name in ("vendor", "device")]
    texts = [*map(system_text, ids), system_text(root / "proc/driver/nvidia/version")]
    dates = [f"{file} {file.stat().st_mtime_ns}" for file in drivers]
    return "\n".join([*map(str, nodes), *texts, *dates])


def choose(spec: str | None = None) -> Device:
    """The device that `--device` names, None the best. Raises UsageError, and TargetError if none is usable."""
    return base.choose_from("vulkan", spec, _usable)


def findings() -> Iterator[Finding]:
    """The plugin, compiled if necessary (some ten seconds, once), and its devices."""
    yield Finding("vulkan plugin", "ok", vulkan_plugin.origin())
    yield from (device.finding() for device in devices())


def _usable() -> list[Device]:
    found = devices()
    usable = [device for device in found if not device.problem]
    if not usable:
        reasons = "; ".join(f"{device.title}: {device.problem}" for device in found)
        raise TargetError("no Vulkan device can be used", found=reasons, next_step="update its driver")
    return usable


def _described() -> list[Any]:
    """The plugin's description of all devices, usable ones first. Raises TargetError."""
    described = json.loads(function("describe")())
    if described["problem"]:
        raise TargetError(described["problem"], next_step=_driver_advice())
    return list(described["devices"])


def function(name: str) -> Any:
    """The plugin's function `mlcpipe.vulkan.<name>`. Raises TargetError if there is none that loads."""
    load()
    return tvm_runtime.function(f"mlcpipe.vulkan.{name}")


@functools.cache
def load() -> None:
    """Make `vulkan:i` a device of TVM in this process; `load_module` then reads bundles with kernels for it."""
    vulkan_plugin.load()
    # Drivers unload when the process ends: nothing may run on the device then.
    atexit.register(_finish)


def prepare(module: Any, device: Device, threads: int) -> None:
    """Compile all kernels of a module for a device now, on several threads, instead of each at its first call.

    `module` is a runtime module of kind "vulkan" or one that imports some. Raises TargetError or ResourceError.
    """
    with errors():
        for part in _vulkan_parts(module):
            function("prepare")(part, device.index, threads)


@contextmanager
def _naming_target(device: Device) -> Iterator[None]:
    """Adds the best target to errors about a kernel that the device cannot run."""
    try:
        yield
    except TargetError as error:
        what, found, _ = error.what.partition(_OF_ANOTHER_DEVICE)
        if not found:
            raise
        raise TargetError(what, next_step=f"compile the model with --target {device.best_target()}") from error


def counts(device: Device) -> dict[str, int]:
    """The plugin's counters of a device: dispatches, submits, barriers, buffers, pipelines, bytes."""
    return {str(name): int(count) for name, count in function("counts")(device.index).items()}


@contextmanager
def profiled(device: Device) -> Iterator[dict[str, tuple[int, float]]]:
    """Measures kernels on a device inside, one after another: afterwards kernel -> (launches, seconds).

    Raises TargetError for a device without a clock.
    """
    times: dict[str, tuple[int, float]] = {}
    with errors():
        function("profile_start")(device.index)
        yield times
        for name, (calls, nanoseconds) in function("profile_stop")(device.index).items():
            times[str(name)] = int(calls), nanoseconds * 1e-9


def save_pipelines() -> str:
    """Save the drivers' compiled kernels in the cache for the next process -> "", or why that failed."""
    return str(function("save_pipelines")())


def errors() -> AbstractContextManager[None]:
    """Converts errors of the plugin inside: out of memory to ResourceError, others to TargetError."""
    return base.converted_errors(_converted)


def _converted(error: Exception) -> MlcpipeError | None:
    text = str(error).strip()
    if not text.startswith("vulkan: "):
        return None
    kind = ResourceError if isinstance(error, MemoryError) else TargetError
    return kind(text.removeprefix("vulkan: "))


def _finish() -> None:
    try:
        tvm_runtime.function("mlcpipe.vulkan.wait")()
        save_pipelines()
    except (RuntimeError, MemoryError):  # a lost device has nothing to save
        return


def _device(index: int, entry: Mapping[str, Any]) -> Device:
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
