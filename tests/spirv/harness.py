"""Kernels through the code generator: their SPIR-V checked by Khronos' tools, their numbers by numpy on a device."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from numpy.typing import NDArray
from tvm import te, tirx
from tvm.target import Target

from mlcpipe.compiler.spirv import build, lowering
from mlcpipe.compiler.spirv.kernel import Kernel
from mlcpipe.errors import CompileError

Array = NDArray[Any]
TARGET = Target({"kind": "vulkan", "max_num_threads": 256, "max_shared_memory_per_block": 32768}, host="llvm")
_TOOLS = ("spirv-val", "spirv-opt")
THREADS = 64

needs_tools = pytest.mark.skipif(
    any(shutil.which(tool) is None for tool in _TOOLS), reason="spirv-val and spirv-opt are missing: spirv-tools"
)


@contextlib.contextmanager
def captured() -> Iterator[list[Kernel]]:
    """The kernels of what is compiled inside, without a runtime. Raises CompileError."""
    lowering.install()
    found: list[Kernel] = []
    errors: list[CompileError] = []

    def build_nothing(mod: Any, target: Any) -> None:
        try:
            found.extend(build.compile_module(mod, target))
        except CompileError as error:  # TVM would make a RuntimeError of it
            errors.append(error)

    tvm_ffi.register_global_func("target.build.vulkan", build_nothing, override=True)
    yield found
    for error in errors:
        raise error


def kernels(func: tirx.PrimFunc | tvm.IRModule) -> list[Kernel]:
    """The kernels of a PrimFunc with launch parameters. Raises CompileError."""
    mod = func if isinstance(func, tvm.IRModule) else tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    with captured() as found:
        tvm.compile(mod, target=TARGET)
    return found


def check(found: Sequence[Kernel], folder: Path) -> None:
    """Every module is valid, alone and after all optimizations of spirv-opt."""
    assert found
    paths = []
    for i, kernel in enumerate(found):
        path = folder / f"{i}.spv"
        path.write_bytes(kernel.code)
        paths.append((kernel.name, path))
    for name, path in paths:
        optimized = path.with_suffix(".opt")
        _tool(name, "spirv-val", "--target-env", "vulkan1.2", str(path))
        _tool(name, "spirv-opt", "--target-env=vulkan1.2", "-O", str(path), "-o", str(optimized))
        _tool(name, "spirv-val", "--target-env", "vulkan1.2", str(optimized))


def _tool(name: str, *command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, f"{name}: {done.stderr[:1000]}"


def disassembled(kernel: Kernel) -> str:
    """The assembly of a kernel."""
    done = subprocess.run(["spirv-dis", "-"], input=kernel.code, capture_output=True, check=True, timeout=60)
    return done.stdout.decode()


def elementwise(dtypes: Sequence[str], function: Callable[..., Any], size: int = 256) -> tirx.PrimFunc:
    """out[i] = function(a[i], ...), an invocation an element."""
    inputs = [te.placeholder((size,), dtype, name=f"x{i}") for i, dtype in enumerate(dtypes)]
    output = te.compute((size,), lambda i: function(*(x[i] for x in inputs)), name="y")
    schedule = tvm.s_tir.Schedule(te.create_prim_func([*inputs, output]))
    (loop,) = schedule.get_loops(schedule.get_sblock("y"))
    outer, inner = schedule.split(loop, [None, THREADS])
    schedule.bind(outer, "blockIdx.x")
    schedule.bind(inner, "threadIdx.x")
    return schedule.mod["main"]


def run(func: tirx.PrimFunc | tvm.IRModule, arguments: Sequence[Array | int | float], outputs: Sequence[int]) -> list[Array]:
    """The arguments at `outputs` after a call on the device."""
    build.register()
    mod = func if isinstance(func, tvm.IRModule) else tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    compiled = tvm.compile(mod, target=TARGET)
    device = tvm.device("vulkan", 0)
    values = [tvm.runtime.tensor(a, device) if isinstance(a, np.ndarray) else a for a in arguments]
    compiled["main"](*values)
    return [values[i].numpy() for i in outputs]
