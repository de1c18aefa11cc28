"""A process with the emulated Metal device: what our device API and module loader do with good and bad calls: made.json."""

from __future__ import annotations

import ctypes
import json
import struct
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tvm
import tvm_ffi

from tests.metal import emulation

SOURCE = """#include <metal_stdlib>
using namespace metal;
struct scaled_args_t { int n, padding; float factor; };
kernel void scaled(device float* y [[ buffer(0) ]], constant scaled_args_t& arg [[ buffer(1) ]],
                   uint3 blockIdx [[threadgroup_position_in_grid]], uint3 threadIdx [[thread_position_in_threadgroup]]) {
  int i = blockIdx.x * 32 + threadIdx.x;
  if (i < arg.n) y[i] = y[i] * arg.factor;
}
"""
HANDLE, INT32, FLOAT32 = (3, 64), (0, 32), (2, 32)  # code and bits of DLDataType
COUNT = 70


def _text(words: str) -> bytes:
    return struct.pack("<Q", len(words)) + words.encode()


def library(types: Sequence[tuple[int, int]], form: str = "metal", kernel: str = "scaled") -> bytes:
    """One kernel, as TVM's code generator writes it."""
    written = b"".join(struct.pack("<BBH", code, bits, 1) for code, bits in types)
    tags = b"".join(map(_text, ("blockIdx.x", "threadIdx.x")))
    info = (
        _text("scaled") + struct.pack("<Q", len(types)) + written + struct.pack("<Q", 2) + tags + struct.pack("<Q", 0)
    )
    one = struct.pack("<Q", 1)
    return _text(form) + one + _text("scaled") + info + one + _text(kernel) + _text(SOURCE)


def said(call: Callable[[], Any]) -> str:
    """The error of a call, "" without one."""
    try:
        call()
    except Exception as error:  # tvm_ffi gives MemoryError, RuntimeError and its own
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return ""


def main(runtime: Path, folder: Path) -> None:
    """Write what each call gave."""
    emulation.start(runtime, folder)
    device = tvm.device("metal", 0)
    load = tvm_ffi.get_global_func("ffi.Module.load_from_bytes.metal")
    background = tvm_ffi.get_global_func("mlcpipe.metal.set_background")
    fail = tvm_ffi.get_global_func("emulated_metal.fail")
    x = np.arange(COUNT, dtype=np.float32)
    y, other = tvm.runtime.tensor(x, device), tvm.runtime.empty((COUNT,), "float32", device)
    scaled = load(library([HANDLE, INT32, FLOAT32])).get_function("scaled")
    made: dict[str, Any] = {"name": device.device_name, "missing": tvm.device("metal", 1).exist}

    def run(count: int = COUNT, *, address: int | None = None, threads: int = 32) -> None:
        scaled(ctypes.c_void_p(address or y.data_ptr()), count, 2.5, 3, threads)

    run(COUNT - 1)
    y.copyto(other)  # it waits for the kernel
    run()  # what was copied does not change
    made["copied"], made["twice"] = other.numpy().tolist(), y.numpy().tolist()
    run()
    y.copyfrom(x)  # the kernel is over when the CPU writes
    made["written"] = y.numpy().tolist()

    run()
    background(True)
    made["background"] = [said(run), said(lambda: y.copyto(other))]
    made["read in the background"] = y.numpy().tolist()
    background(False)
    made["back"] = said(run)

    fail("Caused GPU Timeout Error")
    made["failed"], made["after"] = said(device.sync), said(lambda: [run(), device.sync()])
    made["foreign"] = said(lambda: run(address=64))
    made["threads"] = said(lambda: run(threads=512))
    made["memory"] = said(lambda: tvm.runtime.empty((1 << 34,), "float32", device))
    made["empty"] = tvm.runtime.empty((0,), "float32", device).numpy().tolist()
    made["libraries"] = [
        said(lambda bad=bad: load(bad))
        for bad in (
            library([HANDLE])[:-9],
            library([HANDLE], form="metallib"),
            library([HANDLE], kernel="other"),
            library([HANDLE] * 31 + [INT32]),
            library([HANDLE] + [INT32] * 513),
        )
    ]
    (folder / "made.json").write_text(json.dumps(made))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
