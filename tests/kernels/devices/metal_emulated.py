"""The emulated Metal device.

`python -m tests.kernels.devices.metal_emulated RUNTIME FOLDER NAME ...` runs cases in a process of its own, which the
device stays in, and writes their errors to FOLDER/errors.json.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm import tirx

from mlcpipe.compiler.backends import metal
from mlcpipe.compiler.build import build_kernels
from mlcpipe.passes import pipeline
from mlcpipe.passes.lowering import KernelModule
from mlcpipe.targets import compiled_variants, load_target, tvm_target
from tests.kernels.cases.gpu.case import Array, Call, Case
from tests.kernels.devices.run import check_calls, write_errors
from tests.metal import emulation

TARGET = load_target("metal")


def module(functions: Mapping[str, tirx.PrimFunc]) -> Any:
    """Functions compiled for the device, with code of the host for this machine."""
    device = {**tvm_target(TARGET, compiled_variants(TARGET)[0]).export(), "host": {"kind": "llvm"}}
    named = {name: func.with_attr("global_symbol", name) for name, func in functions.items()}
    return build_kernels(KernelModule(tvm.IRModule(named), tvm.target.Target(device)), pipeline.SOURCES)


def check(case: Case) -> None:
    """Assert that each call of a case leaves what it must."""
    compiled, device = module(case.functions(TARGET.schedule)), tvm.device("metal", 0)

    def run(call: Call) -> list[Array]:
        values = [tvm.runtime.tensor(a, device) if isinstance(a, np.ndarray) else a for a in call.args]
        compiled[call.function](*values)
        return [value.numpy() for value in values if not isinstance(value, (int, float))]

    check_calls(case, run)


if __name__ == "__main__":
    emulation.start(Path(sys.argv[1]), Path(sys.argv[2]))
    metal.register()
    write_errors(check, sys.argv[3:], Path(sys.argv[2]))
