"""A Vulkan device, Mesa's in software as a rule.

`python -m tests.kernels.devices.vulkan LANES FOLDER NAME ...` runs cases in a process of its own and writes their errors
to FOLDER/errors.json: how many lanes a subgroup of Mesa's software device has follows from LP_NATIVE_VECTOR_WIDTH.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm import tirx

from mlcpipe.compiler.backends.spirv import codegen
from mlcpipe.compiler.build import build_kernels
from mlcpipe.devices import vulkan
from mlcpipe.passes.lowering import KernelModule
from mlcpipe.targets import compiled_variants, load_target, tvm_target
from tests.kernels.cases.gpu.case import Array, Case, Knobs
from tests.kernels.devices.run import check_calls, write_errors


def knobs(lanes: int, shuffled: bool) -> Knobs:
    """Facts for subgroups of `lanes`. If `shuffled`, octets share x; otherwise subgroups share columns."""
    own = {"subgroup": lanes, "shuffle_x": int(shuffled), "gemv_blocks": 2, "gemm_blocks": 2, "gemm_rows": 4}
    own |= {"gemv_invocations": 1 if shuffled else 4096, "norm_threads": lanes if shuffled else 4 * lanes}
    return {**load_target("vulkan").schedule, **own}


def run(module: Any, function: str, *arguments: Array | int | float) -> list[Array]:
    """All tensors after a call on the device."""
    device = tvm.device("vulkan", 0)
    values = [tvm.runtime.tensor(a, device) if isinstance(a, np.ndarray) else a for a in arguments]
    module[function](*values)
    return [value.numpy() for value in values if not isinstance(value, (int, float))]


def module(functions: Mapping[str, tirx.PrimFunc]) -> Any:
    """Functions compiled for the device."""
    vulkan.load()
    codegen.register()
    target = load_target("vulkan")
    named = {name: func.with_attr("global_symbol", name) for name, func in functions.items()}
    return build_kernels(KernelModule(tvm.IRModule(named), tvm_target(target, compiled_variants(target)[0])))


def check(case: Case, facts: Knobs) -> None:
    """Assert that each call of a case leaves what it must."""
    compiled = module(case.functions(facts))
    check_calls(case, lambda call: run(compiled, call.function, *call.args))


if __name__ == "__main__":
    facts = knobs(int(sys.argv[1]), shuffled=False)
    write_errors(lambda case: check(case, facts), sys.argv[3:], Path(sys.argv[2]))
