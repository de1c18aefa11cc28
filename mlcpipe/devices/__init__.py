"""The kinds of device that a model runs on: one file `<kind>.py` per kind, named as in `--device`."""

from __future__ import annotations

import functools
import importlib
import pkgutil
import sys
from typing import TYPE_CHECKING, cast

from mlcpipe.errors import TargetError, UsageError
from mlcpipe.support.closest import closest

if TYPE_CHECKING:
    from mlcpipe.bundle.manifest import VariantInfo
    from mlcpipe.devices.base import Device, Kind


# What people call devices elsewhere.
_ELSEWHERE = {
    **dict.fromkeys(("gpu", "opencl", "rocm", "igpu"), "vulkan, cuda or metal"),
    "mps": "metal",
    "nvidia": "cuda",
    **dict.fromkeys(("npu", "host"), "cpu"),
    **dict.fromkeys(("web", "wasm", "browser"), "`mlcpipe chat --web`, which runs in a browser"),
}


@functools.cache
def kinds() -> tuple[str, ...]:
    """The names of all kinds."""
    modules = pkgutil.iter_modules(__path__)
    return tuple(sorted(module.name for module in modules if not module.ispkg and module.name != "base"))


def kind(name: str) -> Kind:
    """The module of a kind. Raises UsageError for another name."""
    if name not in kinds():
        raise UsageError(
            "there is no such device", expected=closest(name, kinds(), _ELSEWHERE), found=repr(name)[:80],
            next_step="`mlcpipe doctor` lists this computer's",
        )  # fmt: skip
    return cast("Kind", importlib.import_module(f"mlcpipe.devices.{name}"))


def kind_name(spec: str) -> str:
    """The kind in a value of `--device`: "cuda" of "cuda:1". Raises UsageError for an unknown one."""
    name = spec.partition(":")[0]
    kind(name)
    return name


def browser_target() -> str:
    """The target for browsers."""
    targets = (getattr(kind(name), "BROWSER_TARGET", "") for name in kinds())
    return next(str(target) for target in targets if target)


def gpu_kinds() -> tuple[str, ...]:
    """The kinds of GPU that this system may have."""
    return tuple(name for name in kinds() if sys.platform in getattr(kind(name), "GPUS_OF", ()))


def choose(spec: str) -> Device:
    """The device that `--device` names: `cuda` is the first of its kind, `cuda:1` the second.

    Raises UsageError for an unknown name or number, TargetError without a driver or device.
    """
    return kind(kind_name(spec)).choose(spec)


def open_device(variant: VariantInfo, spec: str | None) -> Device:
    """The device that runs the code of a variant; `spec` is the value of `--device`, None the first suitable one.

    Raises UsageError for an unsuitable device, TargetError if there is no suitable one.
    """
    name = kind_of(variant)
    asked = (spec or name).partition(":")[0]
    if asked != name and asked in kinds():
        raise UsageError(
            f"the bundle runs on {kind(name).TITLE}", expected=f"--device {name}:0", found=str(spec)[:80],
            next_step=f"compile the model with --target {asked}",
        )  # fmt: skip
    device = kind(name).choose(spec)
    device.check_code(variant.tvm_facts)
    return device


def kind_of(variant: VariantInfo) -> str:
    """The kind of device that runs the code of a variant. Raises TargetError if there is none."""
    wanted = variant.tvm_facts.get("kind")
    for name in kinds():
        if wanted == kind(name).TVM_KIND:
            return name
    from mlcpipe.support.json_files import shown  # the command line starts without pydantic

    raise TargetError(
        "nothing here runs the bundle", found=f"code for {shown(wanted)}", next_step="compile the model again"
    )
