"""An NVIDIA GPU."""

from __future__ import annotations

import numpy as np
import tvm

from mlcpipe.compiler.backends.nvrtc import codegen
from mlcpipe.compiler.backends.nvrtc.nvrtc import Nvrtc
from mlcpipe.compiler.build import build_kernels
from mlcpipe.passes import pipeline
from mlcpipe.passes.lowering import KernelModule
from mlcpipe.targets import compiled_variants, load_target, tvm_target
from tests.kernels.cases.gpu.case import Array, Call, Case
from tests.kernels.devices.run import check_calls


def check(case: Case, name: str, nvrtc: Nvrtc) -> None:
    """Assert that each call of a case leaves what it must, compiled for the target `name`."""
    target = load_target(name)
    codegen.register(codegen.fat_binary(nvrtc, target.architectures))
    named = {key: func.with_attr("global_symbol", key) for key, func in case.functions(target.schedule).items()}
    kernels = KernelModule(tvm.IRModule(named), tvm_target(target, compiled_variants(target)[0]))
    module, device = build_kernels(kernels, pipeline.SOURCES), tvm.device("cuda", 0)

    def run(call: Call) -> list[Array]:
        values = [tvm.runtime.tensor(a, device) if isinstance(a, np.ndarray) else a for a in call.args]
        module[call.function](*values)
        return [value.numpy() for value in values if not isinstance(value, (int, float))]

    check_calls(case, run)
