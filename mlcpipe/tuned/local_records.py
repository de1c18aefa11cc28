"""This machine's device for a target's kernels, and the tuning records for that device."""

from __future__ import annotations

from pathlib import Path

from mlcpipe import devices
from mlcpipe.errors import TargetError
from mlcpipe.host import cpu_features
from mlcpipe.targets import Target, triple
from mlcpipe.tuned.records import Tuned, files_of, tuned_for


def device_of(target: Target) -> str:
    """The device that the target names, or this machine's device for its kernels; "" for none."""
    if target.device:
        return target.device
    if cpu_features.architecture_of(triple(target)) != cpu_features.architecture():
        return ""
    try:
        return devices.kind(target.backend).choose().record_name
    except TargetError:  # no device or driver: the compiled library runs elsewhere
        return ""


def local_records(target: Target, cache: Path | None) -> Tuned:
    """The records for a target on this machine. Raises ConfigError for a broken file."""
    if not any(path.is_file() for path in files_of(target, cache)):
        return Tuned()
    return tuned_for(target, device_of(target), cache)
