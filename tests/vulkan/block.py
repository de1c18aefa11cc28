"""A norm and a projection, scheduled by TVM's own rules: its library, inputs, and error on the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlcpipe.devices import vulkan
from mlcpipe.devices.support import tvm_runtime
from tests.vulkan.gpu import download, upload

ROWS = (1, 7, 33, 128)
HIDDEN, OUT = 256, 512


def library(dtype: str, output: Path) -> Path:
    import tvm
    from tvm import relax
    from tvm.relax.frontend import nn
    from tvm.s_tir import dlight
    from tvm.target import Target

    from mlcpipe.compiler.backends.spirv import codegen as build

    class Block(nn.Module):
        def __init__(self) -> None:
            self.norm = nn.RMSNorm(HIDDEN, -1, 1e-5, bias=False, dtype=dtype)
            self.project = nn.Linear(HIDDEN, OUT, bias=False, dtype=dtype)

        def forward(self, x: nn.Tensor) -> nn.Tensor:
            return self.project(self.norm(x))

    spec = {"forward": {"x": nn.spec.Tensor([1, "n", HIDDEN], dtype)}}
    module, _ = Block().export_tvm(spec)
    build.register()
    target = Target({"kind": "vulkan", "max_num_threads": 256, "max_shared_memory_per_block": 32768}, host="llvm")
    with target:
        module = relax.get_pipeline("zero")(module)
        rules = (dlight.gpu.Matmul(), dlight.gpu.GEMV(), dlight.gpu.Reduction(), dlight.gpu.Fallback())
        module = dlight.ApplyDefaultSchedule(*rules)(module)
    tvm.compile(module, target=target).export_library(str(output))
    return output


def inputs(dtype: str, rows: int) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    generator = np.random.default_rng(rows)
    x, norm = generator.standard_normal((1, rows, HIDDEN)), 1 + 0.1 * generator.standard_normal(HIDDEN)
    return x.astype(dtype), norm.astype(dtype), (0.1 * generator.standard_normal((OUT, HIDDEN))).astype(dtype)


def worst_error(path: Path, dtype: str) -> float:
    """Runs the library with the runtime alone; the largest difference to float64, relative to the largest number."""
    vulkan.load()
    machine = tvm_runtime.virtual_machine(tvm_runtime.load_module(path), (vulkan.Device.TYPE, 0))
    worst = 0.0
    for rows in ROWS:
        x, norm, weight = inputs(dtype, rows)
        found = download(machine["forward"](upload(x), upload(norm), upload(weight))).astype(np.float64)
        wide = x.astype(np.float64)
        expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * norm @ weight.astype(np.float64).T
        assert found.shape == (1, rows, OUT)
        worst = max(worst, float(np.abs(found - expected).max() / np.abs(expected).max()))
    return worst
