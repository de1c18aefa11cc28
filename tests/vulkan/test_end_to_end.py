"""A compiled library through TVM's virtual machine on the device: norm and projection with a dynamic number of rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlcpipe.devices import vulkan
from tests.vulkan.block import library, worst_error
from tests.vulkan.watch import watching

ROOT = Path(__file__).parents[2]
BOUNDS = {"float32": 2e-5, "float16": 1e-2}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_norm_and_projection(gpu: vulkan.Device, tmp_path: Path, dtype: str) -> None:
    if dtype == "float16" and not {"shaderFloat16", "storageBuffer16BitAccess"} <= gpu.features:
        pytest.skip("this device has no float16")
    path = library(dtype, tmp_path / "model.so")
    assert worst_error(path, dtype) < BOUNDS[dtype]
    # A fresh process has neither the compiler nor the code generator.
    code = f"""import sys, json; sys.modules['torch'] = None
from pathlib import Path
from tests.vulkan.block import worst_error
print(json.dumps([worst_error(Path({str(path)!r}), {dtype!r}), 'tvm' in sys.modules]))"""
    environment = {**os.environ, **watching()}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280
    )
    assert (done.returncode, done.stderr) == (0, "")
    error, has_compiler = json.loads(done.stdout)
    assert error < BOUNDS[dtype]
    assert not has_compiler
