"""The devices on which a target's kernels are measured."""

from __future__ import annotations

import importlib
from typing import Any

from mlcpipe.compiler.backends import backend_of
from mlcpipe.errors import TargetError
from mlcpipe.targets import Target
from mlcpipe.tuned.local_records import device_of


def own_measuring(target: Target) -> Any:
    """The module here that the backend names in `MEASURED_IN`, with `device_name` and `Bench`.

    None for kernels that run in this process, which `mlcpipe.tuning.measure` measures.
    """
    name = getattr(backend_of(target), "MEASURED_IN", None)
    return importlib.import_module(f"mlcpipe.tuning.{name}") if name else None


def measured_device(target: Target) -> str:
    """The device here to measure a target's kernels on. Raises TargetError if there is none."""
    own = own_measuring(target)
    device = device_of(target) if own is None else str(own.device_name())
    if not device:
        raise TargetError("no device of this machine runs the target's kernels", where=target.name)
    return device
