"""Several devices or targets in one option, `vulkan,cpu`: a model in stages; what else can be asked for then."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mlcpipe.errors import UsageError
from mlcpipe.support.defaults import AUTO


def first_of(several: str) -> str:
    """The first of some devices or targets with commas between them."""
    return several.split(",")[0]


def pairs(device: str, target: str | None) -> list[tuple[str, str | None]]:
    """Each device with its target, or None for the best. Raises UsageError for targets of another number."""
    specs, names = device.split(","), [] if target is None else target.split(",")
    if len(names) not in (0, 1, len(specs)) or (device == AUTO and len(names) > 1):
        raise UsageError("--target", expected="one target for each of --device, or one for all", found=target)
    return [(spec, (names * len(specs))[index] if names else None) for index, spec in enumerate(specs)]


def check_stages(
    bundle: Path | None,
    device: str,
    stages: Sequence[int] | None,
    device_memory_bytes: int | None = None,
    *,
    adapters: bool,
    draft_head: str | None,
    best: bool,
) -> None:
    """Raise UsageError for stages of a bundle, without devices, or with what a model in stages cannot have yet."""
    if stages is not None and (bundle is not None or "," not in device):
        found = "a bundle, which is cut already" if bundle is not None else f"--device {device}"
        raise UsageError("--stages", expected="a checkpoint and a device for each, as --device vulkan,cpu", found=found)
    if device_memory_bytes is not None and (bundle is not None or (device != AUTO and "," not in device)):
        found = "a bundle, which is cut already" if bundle is not None else f"--device {device}"
        expected = "a checkpoint and several devices, as --device vulkan,cpu"
        raise UsageError("--device-memory-bytes", expected=expected, found=found)
    asked = {"adapters": adapters, "a draft head": draft_head not in (None, "none"), "--best": best}
    for name, given in asked.items():
        if given and bundle is None and "," in device:
            raise UsageError(
                f"no stages with {name}", found=f"--device {device}", next_step="leave it out, or one device"
            )
