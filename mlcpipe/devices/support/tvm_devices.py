"""Shared by the runtimes in TVM's wheel, CUDA's and Metal's."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tvm_ffi.libinfo import load_lib_ctypes

from mlcpipe.devices.support import tvm_runtime
from mlcpipe.errors import MlcpipeError, ResourceError, TargetError, first_line, last_line

# DeviceAttrKind of TVM's device_api.h
EXISTS, COMPUTE_VERSION, NAME, TOTAL_MEMORY, FREE_MEMORY = 0, 4, 5, 14, 15


def load_library(kind: str, title: str, advice: str) -> None:
    """Load TVM's runtime of a kind, "cuda". Raises TargetError if the package has none that loads."""
    spec = importlib.util.find_spec("tvm")
    folder = Path(str(spec.origin)).parent / "lib" if spec is not None else Path()
    try:
        load_lib_ctypes("tvm", f"tvm_runtime_{kind}", "RTLD_LOCAL", [folder])
    except (OSError, RuntimeError) as error:
        raise TargetError(f"TVM's {title} runtime does not load", found=first_line(error), next_step=advice) from error


def indices(device_type: int, max_count: int) -> Iterator[int]:
    """The numbers of the devices of a type, DLPack's."""
    for index in range(max_count):
        if not attribute(device_type, index, EXISTS):
            return
        yield index


def attribute(device_type: int, index: int, which: int) -> Any:
    """TVM's attribute of a device."""
    return tvm_runtime.function("runtime.GetDeviceAttr")(device_type, index, which)


def convert_error(
    error: Exception, title: str, ours: Sequence[str], no_memory: Sequence[str], advice: str | None = None
) -> MlcpipeError | None:
    """Our error for a runtime's: ResourceError if out of memory, else TargetError.

    None for a text without a word of `ours`, which is another component's; a word of `no_memory` means out of memory.
    """
    text = " ".join(str(error).split())
    if not any(word in text for word in ours):
        return None
    found = last_line(error)
    if isinstance(error, MemoryError) or any(word in text for word in no_memory):
        return ResourceError("the GPU has not enough memory", found=found)
    return TargetError(f"{title} failed", found=found, next_step=advice)
