"""Devices of the runtimes that come in TVM's wheel, CUDA's and Metal's: what both need."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tvm_ffi.libinfo import load_lib_ctypes

from mlcpipe.errors import MlcpipeError, ResourceError, TargetError, UsageError
from mlcpipe.runtime import tvm_runtime

# DeviceAttrKind of TVM's device_api.h
EXISTS, COMPUTE_VERSION, NAME, TOTAL_MEMORY, FREE_MEMORY = 0, 4, 5, 14, 15


class Named(Protocol):
    """A device as `--device` and people call it."""

    @property
    def spec(self) -> str: ...

    @property
    def name(self) -> str: ...


D = TypeVar("D", bound=Named)


def load_library(kind: str, title: str, advice: str) -> None:
    """Load TVM's runtime of a kind, "cuda". Raises TargetError where the package has none that loads."""
    spec = importlib.util.find_spec("tvm")
    folder = Path(str(spec.origin)).parent / "lib" if spec is not None else Path()
    try:
        load_lib_ctypes("tvm", f"tvm_runtime_{kind}", "RTLD_LOCAL", [folder])
    except (OSError, RuntimeError) as error:
        found = str(error).strip().splitlines()[0][:200]
        raise TargetError(f"TVM's {title} runtime does not load", found=found, next_step=advice) from error


def indices(device_type: int, most: int) -> Iterator[int]:
    """The numbers of the devices of a type, DLPack's."""
    for index in range(most):
        if not attribute(device_type, index, EXISTS):
            return
        yield index


def attribute(device_type: int, index: int, which: int) -> Any:
    """What TVM says of a device."""
    return tvm_runtime.function("runtime.GetDeviceAttr")(device_type, index, which)


def chosen(kind: str, spec: str | None, devices: Callable[[], Sequence[D]]) -> D:
    """The device that `--device` names: `cuda` or None takes the first, `cuda:1` the second.

    Raises UsageError for another word or a number that no device has, and what `devices` raises.
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
def errors(title: str, ours: Sequence[str], no_memory: Sequence[str], advice: str | None = None) -> Iterator[None]:
    """Turns what a runtime says into errors of ours: no memory is ResourceError, all else TargetError.

    Texts without a word of `ours` are somebody else's; one of `no_memory` says that there is no memory.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        text = " ".join(str(error).split())
        if isinstance(error, MlcpipeError) or not any(word in text for word in ours):
            raise
        found = (str(error).strip().splitlines() or [text])[-1][:300]
        if isinstance(error, MemoryError) or any(word in text for word in no_memory):
            raise ResourceError("the GPU has not enough memory", found=found) from error
        raise TargetError(f"{title} failed", found=found, next_step=advice) from error
