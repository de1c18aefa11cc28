"""A compiled library through TVM's virtual machine on the device: norm and projection with a dynamic number of rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mlcpipe.runtime import tvm_runtime, vulkan
from tests.vulkan.gpu import download, upload
from tests.vulkan.watch import watching

ROOT = Path(__file__).parents[2]
ROWS = (1, 7, 33, 128)
HIDDEN, OUT = 256, 512
CPU, POOLED = 1, 2
BOUNDS = {"float32": 2e-5, "float16": 1e-2}


def library(dtype: str, output: Path) -> Path:
    import tvm
    from tvm import relax
    from tvm.relax.frontend import nn
    from tvm.s_tir import dlight
    from tvm.target import Target

    from mlcpipe.compiler.spirv import build

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
    machine = tvm_runtime.load_module(path)["vm_load_executable"]()
    machine["vm_initialization"](vulkan.DEVICE_TYPE, 0, POOLED, CPU, 0, POOLED)
    worst = 0.0
    for rows in ROWS:
        x, norm, weight = inputs(dtype, rows)
        found = download(machine["forward"](upload(x), upload(norm), upload(weight))).astype(np.float64)
        wide = x.astype(np.float64)
        expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * norm @ weight.astype(np.float64).T
        assert found.shape == (1, rows, OUT)
        worst = max(worst, float(np.abs(found - expected).max() / np.abs(expected).max()))
    return worst


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_norm_and_projection(gpu: vulkan.Device, tmp_path: Path, dtype: str) -> None:
    if dtype == "float16" and not {"shaderFloat16", "storageBuffer16BitAccess"} <= gpu.features:
        pytest.skip("this device has no float16")
    path = library(dtype, tmp_path / "model.so")
    assert worst_error(path, dtype) < BOUNDS[dtype]
    # A fresh process has neither the compiler nor the code generator.
    code = f"""import sys, json; sys.modules['torch'] = None
from pathlib import Path
from tests.vulkan.test_end_to_end import worst_error
print(json.dumps([worst_error(Path({str(path)!r}), {dtype!r}), 'tvm' in sys.modules]))"""
    environment = {**os.environ, **watching()}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280
    )
    assert (done.returncode, done.stderr) == (0, "")
    error, has_compiler = json.loads(done.stdout)
    assert error < BOUNDS[dtype]
    assert not has_compiler
