"""Tensors on `vulkan:i` through TVM's runtime library alone: `import tvm` would cost each process of a test a second."""

from __future__ import annotations

import ctypes
import struct
import time
from typing import Any

import numpy as np
import tvm_ffi
from numpy.typing import NDArray

from mlcpipe.devices.support.tvm_runtime import function
from mlcpipe.devices.vulkan import Device


def device(index: int = 0) -> Any:
    return tvm_ffi.device("vulkan", index)


def empty(shape: tuple[int, ...], dtype: str, index: int = 0) -> Any:
    return function("runtime.TVMTensorAllocWithScope")(tvm_ffi.Shape(shape), tvm_ffi.dtype(dtype), device(index), None)


def upload(values: NDArray[Any], index: int = 0) -> Any:
    tensor = empty(values.shape, values.dtype.name, index)
    assign(tensor, values)
    return tensor


def assign(tensor: Any, values: NDArray[Any]) -> None:
    values = np.ascontiguousarray(values)
    function("runtime.TVMTensorCopyFromBytes")(tensor, ctypes.c_void_p(values.ctypes.data), values.nbytes)


def download(tensor: Any) -> NDArray[Any]:
    values = np.empty(tuple(tensor.shape), str(tensor.dtype))
    function("runtime.TVMTensorCopyToBytes")(tensor, ctypes.c_void_p(values.ctypes.data), values.nbytes)
    return values


def copied(tensor: Any, index: int = 0) -> Any:
    """A copy of a tensor, on this device or another."""
    made = empty(tuple(tensor.shape), str(tensor.dtype), index)
    function("runtime.TVMTensorCopyFromTo")(tensor, made)
    return made


def sync(index: int = 0) -> None:
    function("runtime.Device_StreamSync")(device(index), 0)


def set_device(index: int) -> None:
    """What TVM's host code does before a launch."""
    function("__tvm_set_device")(Device.TYPE, index)


def times(
    module: Any, name: str, *arguments: Any, number: int = 1, repeat: int = 1, index: int = 0
) -> tuple[float, ...]:
    """Seconds of a call, `repeat` times measured over `number` calls, after one to warm up."""
    evaluate = function("runtime.RPCTimeEvaluator")(
        module, name, Device.TYPE, index, number, repeat, 0, 100, 0, 1, 0, ""
    )
    return struct.unpack(f"@{repeat}d", evaluate(*arguments))


def call_us() -> float:
    """Microseconds of this thread for a call from Python that does next to nothing: what times of calls are compared with."""
    best = float("inf")
    for _ in range(5):
        began = time.thread_time()
        for _ in range(10_000):
            set_device(0)
        best = min(best, time.thread_time() - began)
    return best / 10_000 * 1e6
