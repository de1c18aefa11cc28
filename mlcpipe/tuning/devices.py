"""What the device is called that kernels of a target are measured on here, and that `compile` takes records of."""

from __future__ import annotations

from pathlib import Path

from mlcpipe import cpu_features
from mlcpipe.cpu_name import cpu_model
from mlcpipe.errors import TargetError
from mlcpipe.runtime import cuda, vulkan
from mlcpipe.targets import Target, triple
from mlcpipe.tuning.records import Tuned, files_of, tuned_for


def device_of(target: Target) -> str:
    """The device of this machine that a target's kernels run on, or the one that the target names; "" for none."""
    if target.link == "wasm":
        return target.device
    if target.link == "shared" and cpu_features.architecture_of(triple(target)) == cpu_features.architecture():
        return _plain(cpu_model())
    try:
        if target.link == "device":
            return _plain(vulkan.choose().name)
        if target.link == "cuda":
            return _plain(cuda.choose().name)
    except TargetError:  # no device, or no driver: whatever is compiled here runs elsewhere
        return ""
    return ""


def _plain(name: str) -> str:
    """A device's name as records have it."""
    return " ".join("".join(c if c.isprintable() else " " for c in name).split())[:200]


def measured_device(target: Target) -> str:
    """The device that a target's kernels can be measured on from here. Raises TargetError where there is none."""
    if target.link == "wasm":
        from mlcpipe.tuning.webgpu import adapter_name  # with all that measures, which compile does not need

        return _plain(adapter_name())
    device = device_of(target)
    if not device:
        raise TargetError("no device of this machine runs the target's kernels", where=target.name)
    return device


def tuned_here(target: Target, cache: Path) -> Tuned:
    """The records that hold for a target on this machine. Raises ConfigError for a broken file."""
    if not any(path.is_file() for path in files_of(target, cache)):
        return Tuned()
    return tuned_for(target, device_of(target), cache)
