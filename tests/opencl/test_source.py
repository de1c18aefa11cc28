"""The kernels for GPUs in OpenCL C, as a compiler reads it: there is no OpenCL runtime here, Vulkan takes its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlcpipe.errors import TargetError
from mlcpipe.targets import load_target, target_names
from tests.clang import system_clang
from tests.models.published import SIZES, generated
from tests.opencl import opencl_c

CLANG = system_clang()  # that of ziglang has no declarations of OpenCL
needs_clang = pytest.mark.skipif(CLANG is None, reason="no clang is on the path: it checks OpenCL C")
FOLDER = Path(__file__).parent
TARGETS = ("adreno", "mali")
FEW = {"gemma2": "adreno", "qwen3_moe": "mali"}  # windows, softcap, heads of 256; experts
LOCAL_BYTES = 32 << 10


def _check(family: str, target: str) -> None:
    assert CLANG is not None
    scheme = "q4f16_1" if target == "adreno" else "q4f32_1"
    source = opencl_c.with_locals_first(generated(family, str(FOLDER / f"{target}.toml"), scheme, opencl_c))
    assert opencl_c.errors_of(source, CLANG) == []
    needs = opencl_c.local_bytes(source)
    assert len(needs) > 20 and max(needs.values()) <= LOCAL_BYTES, needs


@needs_clang
@pytest.mark.parametrize("family", FEW)
def test_kernels_of_a_family(family: str) -> None:
    _check(family, FEW[family])


@needs_clang
@pytest.mark.everything
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("family", SIZES)
def test_everything(family: str, target: str) -> None:
    _check(family, target)


@needs_clang
def test_the_check_finds_errors() -> None:
    assert CLANG is not None
    kernel = "__kernel void f(__global float* x) {{\n  if (x[0] > 0) {{\n    __local float y[2];\n    {}\n  }}\n}}\n"
    good = opencl_c.with_locals_first(kernel.format("x[0] = y[0] = 1;"))
    assert not opencl_c.errors_of(good, CLANG) and opencl_c.local_bytes(good) == {"f": 8}
    assert opencl_c.errors_of(kernel.format("x[0] = z;"), CLANG)
    assert opencl_c.errors_of(opencl_c.with_locals_first(kernel.format("__global float* z = &y[0];")), CLANG)


@pytest.mark.parametrize("name", ["opencl", "opencl-adreno"])
def test_the_target_is_vulkan(name: str) -> None:
    assert not [known for known in target_names() if load_target(known).tvm["kind"] == "opencl"]
    with pytest.raises(TargetError, match=r"unknown target; expected .*(vulkan|adreno)"):
        load_target(name)
