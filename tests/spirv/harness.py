"""Kernels through the code generator: their SPIR-V checked by Khronos' tools, their numbers by numpy on a device."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tvm
from numpy.typing import NDArray
from tvm import te, tirx
from tvm.target import Target

from mlcpipe.compiler.backends.spirv import codegen as build
from mlcpipe.compiler.backends.spirv import lowering
from mlcpipe.compiler.backends.spirv.kernel import Kernel
from mlcpipe.compiler.build import build_kernels
from mlcpipe.passes import pipeline
from mlcpipe.passes.lowering import KernelModule, Lowering
from tests.spirv.validity import check, needs_tools

__all__ = ["check", "needs_tools"]
Array = NDArray[Any]
TARGET = Target({"kind": "vulkan", "max_num_threads": 256, "max_shared_memory_per_block": 32768}, host="llvm")
THREADS = 64


def kernels(func: tirx.PrimFunc | tvm.IRModule, target: Target = TARGET) -> list[Kernel]:
    """The kernels of PrimFuncs with launch parameters, as tvm.tirx.build has them, without code of hosts.

    Raises CompileError.
    """
    lowering.install()
    mod = func if isinstance(func, tvm.IRModule) else tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    default, _, finalize = tirx.get_default_tir_pipeline(target)
    return build.compile_module(finalize()(_of_device(default(tirx.transform.BindTarget(target)(mod)))), target)


def own_kernels(mod: tvm.IRModule, target: Target = TARGET) -> list[Kernel]:
    """The kernels of `tir_schedules`, which have their barriers, as the compiler has them."""
    lowering.install()
    lowered = pipeline.run(KernelModule(mod, target), pipeline.DEVICE)
    shaders = pipeline.run(lowered.with_mod(_of_device(lowered.mod)), pipeline.SHADERS)
    return build.compile_module(shaders.mod, target)


def _of_device(mod: tvm.IRModule) -> tvm.IRModule:
    return tirx.transform.Filter(lambda f: f.attrs["target"].kind.name == "vulkan")(mod)


def model_kernels(state: Lowering) -> list[Kernel]:
    """The kernels of a scheduled module."""
    lowered = pipeline.run(state, pipeline.VM)
    functions = {
        gv.name_hint: func.with_attr("global_symbol", gv.name_hint)
        for gv, func in lowered.mod.functions.items()
        if isinstance(func, tirx.PrimFunc)
    }
    return own_kernels(tvm.IRModule(functions), lowered.tvm_target)


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


def run(
    func: tirx.PrimFunc | tvm.IRModule,
    arguments: Sequence[Array | int | float],
    outputs: Sequence[int],
    *,
    own: bool = False,
) -> list[Array]:
    """The arguments at `outputs` after a call on the device. `own`: through our own passes, not TVM's pipeline."""
    build.register()
    mod = func if isinstance(func, tvm.IRModule) else tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    compiled = build_kernels(KernelModule(mod, TARGET)) if own else tvm.compile(mod, target=TARGET)
    device = tvm.device("vulkan", 0)
    values = [tvm.runtime.tensor(a, device) if isinstance(a, np.ndarray) else a for a in arguments]
    compiled["main"](*values)
    return [values[i].numpy() for i in outputs]
