"""GEMM on cooperative matrices: valid SPIR-V, the schedule's numbers with the matrices emulated, and on a device."""

from __future__ import annotations

import struct
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm

import mlcpipe
from mlcpipe import Engine
from mlcpipe.compiler.backends.spirv.kernel import Kernel
from mlcpipe.compiler.backends.spirv.opcodes import Access, Capability, Op, Storage
from mlcpipe.devices import vulkan
from mlcpipe.devices.support import driver_check
from mlcpipe.errors import TargetError
from mlcpipe.targets import load_target
from tests.conftest import EXACT, TinyLlama, write_llama
from tests.kernels.cases.gpu.matmul import MATRICES, Product
from tests.kernels.devices import vulkan as device
from tests.spirv import harness
from tests.vulkan.matrix_emulation import Emulation
from tir_schedules.gpu.matmul.coopmat import Shape, shape_of


def _knobs(shape: Shape) -> dict[str, int | str]:
    knobs = {"row_matrices": "tall", "column_matrices": "wide"}
    own = {f"matrix_{knobs.get(name, name)}": value for name, value in vars(shape).items() if name != "size"}
    return {**load_target("vulkan").schedule, "subgroup": shape.size, "gemv_blocks": 1, **own}


def _check(shape: Shape, case: str) -> None:
    """Equal to numpy, of a tile of rows and a part of one."""
    assert shape_of(_knobs(shape)) == shape
    device.check(Product(*MATRICES[case], rows=(shape.tile_rows + 5,)), _knobs(shape))


def _kernel(shape: Shape, gated: bool) -> Kernel:
    """The kernel of the GEMM."""
    product = Product("q4f16_1", 256, 128, "float16", gated)
    function = product.functions(_knobs(shape))["main"].with_attr("global_symbol", "main")
    found = harness.own_kernels(tvm.IRModule({"main": function}))
    (kernel,) = (kernel for kernel in found if "cooperativeMatrix" in kernel.features)
    return kernel


SHAPES = {
    "nvidia": Shape(32, 16, 16, 16, 4, 2, 4),
    "intel": Shape(16, 8, 16, 16, 8, 2, 4),
    "lavapipe": Shape(8, 8, 8, 8, 8, 2, 4),
}


def _instructions(code: bytes) -> list[tuple[int, ...]]:
    """Operation and operands of each."""
    words, found, at = struct.unpack(f"<{len(code) // 4}I", code), [], 5
    while at < len(words):
        length = words[at] >> 16
        found.append((words[at] & 0xFFFF, *words[at + 1 : at + length]))
        at += length
    return found


@pytest.mark.parametrize("name", SHAPES)
def test_a_kernel_asks_for_what_matrices_take(name: str) -> None:
    """Capabilities, extensions, Vulkan's memory model; in it every access to shared memory is one that others see."""
    product, kernel = SHAPES[name], _kernel(SHAPES[name], gated=False)
    code = _instructions(kernel.code)
    asked = {one[1] for one in code if one[0] == Op.Capability}
    assert {Capability.CooperativeMatrixKHR, Capability.VulkanMemoryModel, Capability.Float16} <= asked
    named = {struct.pack(f"<{len(one) - 1}I", *one[1:]).rstrip(b"\0") for one in code if one[0] == Op.Extension}
    assert named >= {b"SPV_KHR_cooperative_matrix", b"SPV_KHR_vulkan_memory_model"}
    assert [one[1:] for one in code if one[0] == Op.MemoryModel] == [(0, 3)]
    steps, tiles = 32 // product.depth, product.row_matrices * product.column_matrices
    count = Counter(one[0] for one in code)
    assert count[Op.CooperativeMatrixLoadKHR] == steps * (product.row_matrices + product.column_matrices)
    assert (count[Op.CooperativeMatrixMulAddKHR], count[Op.CooperativeMatrixStoreKHR]) == (steps * tiles, tiles)
    shared = {one[2] for one in code if one[0] == Op.Variable and one[3] == Storage.Workgroup}
    chains = {one[2] for one in code if one[0] == Op.AccessChain and one[3] in shared}
    accesses = [one for one in code if one[0] == Op.Load and one[3] in chains]
    accesses += [one for one in code if one[0] in (Op.Store, Op.CooperativeMatrixStoreKHR) and one[1] in chains]
    accesses += [one for one in code if one[0] == Op.CooperativeMatrixLoadKHR]
    assert len(accesses) > tiles and all(one[-1] == Access.NonPrivatePointer for one in accesses)
    shape = f"cooperativeMatrix{product.rows}x{product.columns}x{product.depth}"
    assert {"cooperativeMatrix", shape, "vulkanMemoryModel", "shaderFloat16"} <= set(kernel.features)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_a_kernel_is_valid(tmp_path: Path, name: str, gated: bool) -> None:
    kernel = _kernel(SHAPES[name], gated)
    path = tmp_path / "kernel.spv"
    path.write_bytes(kernel.code)
    done = subprocess.run(
        ["spirv-val", "--target-env", "vulkan1.2", str(path)], capture_output=True, text=True, check=False, timeout=60
    )
    if "Invalid capability operand: 6022" in done.stderr:
        pytest.skip("this spirv-val does not know SPV_KHR_cooperative_matrix: SPIRV-Tools 2025.1 does")
    assert (done.returncode, done.stderr) == (0, "")


# What stands for them where there are no matrices: subgroups of 8, the same products.
EMULATED = {"16x16x16": Shape(8, 16, 16, 16, 8, 2, 2), "8x16x16": Shape(8, 8, 16, 16, 8, 2, 2)}


@pytest.mark.full_cases("16x16x16-int4", "16x16x16-gated float16", "16x16x16-gated Q6_K", "16x16x16-uint4")
@pytest.mark.parametrize("case", MATRICES)
@pytest.mark.parametrize("shape", ["16x16x16", pytest.param("8x16x16", marks=pytest.mark.everything)])
def test_the_schedule_with_emulated_matrices_equals_numpy(
    gpu: vulkan.Device, monkeypatch: pytest.MonkeyPatch, shape: str, case: str
) -> None:
    if not gpu.limits["min_subgroup_size"] <= 8 <= gpu.limits["max_subgroup_size"]:
        pytest.skip("this device has no subgroups of 8")
    if not {"shaderFloat16", "storageBuffer16BitAccess"} <= gpu.features:
        pytest.skip("this device has no float16")
    Emulation(8).install(monkeypatch)
    _check(EMULATED[shape], case)


@pytest.mark.parametrize("case", MATRICES)
def test_a_device_with_matrices_equals_numpy(gpu: vulkan.Device, case: str) -> None:
    limits = gpu.limits
    fitting = [
        product
        for product in SHAPES.values()
        if f"cooperativeMatrix{product.rows}x{product.columns}x{product.depth}" in gpu.features
        and limits["min_subgroup_size"] <= product.size <= limits["max_subgroup_size"]
    ]
    if not fitting:
        pytest.skip("this device has no VK_KHR_cooperative_matrix: Mesa 26.2's software device has")
    _check(fitting[0], case)


_MODEL = """base = "lavapipe"
activation_dtype = "float16"
[schedule]
matrix_rows = 8
matrix_columns = 8
matrix_depth = 8
matrix_subgroups = 8
matrix_tall = 2
matrix_wide = 4
"""
_FEATURE = "cooperativeMatrix8x8x8"


def _bundle(folder: Path, name: str, target: str, checkpoint: Path, **options: Any) -> Path:
    (folder / f"{name}.toml").write_text(target, encoding="utf-8")
    where = str(folder / f"{name}.toml")
    return mlcpipe.compile(checkpoint, target=where, quantization="q4f16_1", output=folder / name, **options)


def test_a_device_without_matrices_is_told_the_target_to_take(gpu: vulkan.Device, tmp_path: Path) -> None:
    if _FEATURE in gpu.features:
        pytest.skip("this device has cooperative matrices")
    checkpoint = write_llama(tmp_path / "checkpoint", TinyLlama(intermediate_size=128))
    bundle = _bundle(tmp_path, "gpu", _MODEL, checkpoint, kv_cache_dtype="f16")
    with pytest.raises(TargetError, match="needs cooperativeMatrix.*, which is missing on") as refused:
        Engine(bundle)
    assert str(refused.value).endswith(f"compile the model with --target {gpu.best_target()}")


def test_a_model_on_matrices_equals_the_cpu_engine(
    gpu: vulkan.Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if _FEATURE not in gpu.features:
        pytest.skip(
            "this device has no VK_KHR_cooperative_matrix with matrices of 8 x 8: Mesa 26.2's software device has"
        )
    monkeypatch.setenv("MLCPIPE_CACHE", str(tmp_path / "cache"))  # where no driver passed the driver check yet
    tried: list[str] = []
    compare = driver_check._compare
    monkeypatch.setattr(
        driver_check, "_compare", lambda case, *others: tried.append(case.name) or compare(case, *others)
    )
    checkpoint = write_llama(tmp_path / "checkpoint", TinyLlama(intermediate_size=128))
    bundle = _bundle(tmp_path, "gpu", _MODEL, checkpoint, kv_cache_dtype="f16")
    tokens = list(range(70))  # a tile of rows, and a part of one
    expected = Engine(_bundle(tmp_path, "cpu", EXACT, checkpoint)).logits(tokens)
    found = Engine(bundle).logits(tokens)
    assert "matrices" in tried
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-2 * float(np.abs(expected).max()))
