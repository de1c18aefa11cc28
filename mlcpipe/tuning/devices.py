"""What the device is called that kernels of a target are measured on here, and that `compile` takes records of."""

from __future__ import annotations

from pathlib import Path

from mlcpipe import cpu_features
from mlcpipe.cpu_name import cpu_model
from mlcpipe.targets import Target, triple
from mlcpipe.tuning.records import Tuned, tuned_for


def device_of(target: Target) -> str:
    """The device of this machine that a target's kernels run on; "" where there is none."""
    if target.link == "shared" and cpu_features.architecture_of(triple(target)) == cpu_features.architecture():
        return " ".join(cpu_model().split())[:200]
    return ""


def tuned_here(target: Target, cache: Path) -> Tuned:
    """The records that hold for a target on this machine. Raises ConfigError for a broken file."""
    device = device_of(target)
    return tuned_for(target, device, cache) if device else Tuned()
