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
from tvm import tirx

import mlcpipe
from mlcpipe import Engine
from mlcpipe.compiler.library import own_barriers
from mlcpipe.compiler.spirv.kernel import Kernel
from mlcpipe.compiler.spirv.opcodes import Access, Capability, Op, Storage
from mlcpipe.errors import TargetError
from mlcpipe.nn import definitions
from mlcpipe.quantization.scheme import load_scheme
from mlcpipe.runtime import self_test, vulkan
from mlcpipe.targets import load_target, suited_target
from tests.conftest import TinyLlama, write_llama
from tests.spirv import harness
from tests.vulkan import schedule_cases
from tests.vulkan.matrix_emulation import Emulation
from tir_schedules.gpu.matrix_matmul import Shape, shape_of
from tir_schedules.gpu.subgroup_matmul import subgroup_matmul
from tir_schedules.op import Declined, op_of

# (scheme, rows of the weight, columns, gated): rows that end inside of a tile, groups whose scales share a word or not
CASES = [
    ("q4f16_1", 160, 64, False),
    ("q4f16_1", 128, 96, True),
    ("q8f16_1", 64, 64, False),
    ("q0f16", 128, 32, True),
]


class Product(Shape):
    """Products of tiles of this shape, beside numpy's."""

    @property
    def knobs(self) -> dict[str, int | str]:
        own = {f"matrix_{name}": value for name, value in vars(self).items() if name != "size"}
        return {**load_target("vulkan").schedule, "subgroup": self.size, "gemv_blocks": 1, **own}

    def function(self, scheme_name: str, n: int, k: int, gated: bool) -> tirx.PrimFunc:
        scheme, layout = load_scheme(scheme_name), schedule_cases.LAYOUT
        if gated:
            func = definitions.gated_matmul(scheme, layout, n, k, "silu", "float16")
        else:
            func = definitions.matmul(scheme, layout, n, k, "float16")
        op = op_of(func)
        assert op is not None
        found = subgroup_matmul(op, "float16", self.knobs)
        assert not isinstance(found, Declined), found.reason
        return found

    def check(self, scheme: str, n: int, k: int, gated: bool) -> None:
        """Equal to numpy, of a tile of rows and a part of one."""
        assert shape_of(self.knobs) == Shape(**vars(self))
        function = self.function(scheme, n, k, gated)
        packed, w = schedule_cases.packed_weight(scheme, n, k)
        m = self.height + 5
        x = np.random.default_rng(n).standard_normal((m, k)).astype(np.float16)
        y = x.astype(np.float64) @ w.astype(np.float16).astype(np.float64).T
        if gated:
            gate, up = np.split(y, 2, axis=1)
            y = gate / (1 + np.exp(-gate)) * up
        found = schedule_cases.run(function, x, *packed, np.full(y.shape, np.nan, np.float16))[-1]
        np.testing.assert_allclose(found.astype(np.float64), y, rtol=0, atol=1e-3 * np.abs(y).max())


def _kernel(product: Product, gated: bool) -> Kernel:
    """The kernel of the GEMM."""
    function = product.function("q4f16_1", 256, 128, gated).with_attr("global_symbol", "main")
    with own_barriers():
        found = harness.kernels(tvm.IRModule({"main": function}))
    (kernel,) = (kernel for kernel in found if "cooperativeMatrix" in kernel.features)
    return kernel


SHAPES = {
    "nvidia": Product(32, 16, 16, 16, 4, 2, 4),
    "intel": Product(16, 8, 16, 16, 8, 2, 4),
    "lavapipe": Product(8, 8, 8, 8, 8, 2, 4),
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
    steps, tiles = 32 // product.depth, product.tall * product.wide
    count = Counter(one[0] for one in code)
    assert count[Op.CooperativeMatrixLoadKHR] == steps * (product.tall + product.wide)
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
EMULATED = {"16x16x16": Product(8, 16, 16, 16, 8, 2, 2), "8x16x16": Product(8, 8, 16, 16, 8, 2, 2)}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}x{case[2]}")
@pytest.mark.parametrize("shape", EMULATED)
def test_the_schedule_with_emulated_matrices_equals_numpy(
    gpu: vulkan.Device, monkeypatch: pytest.MonkeyPatch, shape: str, case: tuple[str, int, int, bool]
) -> None:
    if not gpu.limits["min_subgroup_size"] <= 8 <= gpu.limits["max_subgroup_size"]:
        pytest.skip("this device has no subgroups of 8")
    if not {"shaderFloat16", "storageBuffer16BitAccess"} <= gpu.features:
        pytest.skip("this device has no float16")
    Emulation(8).install(monkeypatch)
    EMULATED[shape].check(*case)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}x{case[2]}")
def test_a_device_with_matrices_equals_numpy(gpu: vulkan.Device, case: tuple[str, int, int, bool]) -> None:
    limits = gpu.limits
    fitting = [
        product
        for product in SHAPES.values()
        if f"cooperativeMatrix{product.rows}x{product.columns}x{product.depth}" in gpu.features
        and limits["min_subgroup_size"] <= product.size <= limits["max_subgroup_size"]
    ]
    if not fitting:
        pytest.skip("this device has no VK_KHR_cooperative_matrix: Mesa 26.2's software device has")
    fitting[0].check(*case)


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
_EXACT = 'base = "cpu-native"\n[schedule]\nint8_activations = 0\n'


def _bundle(folder: Path, name: str, target: str, checkpoint: Path, **options: Any) -> Path:
    (folder / f"{name}.toml").write_text(target, encoding="utf-8")
    where = str(folder / f"{name}.toml")
    return mlcpipe.compile(checkpoint, target=where, quantization="q4f16_1", output=folder / name, **options)


def test_a_model_equals_the_cpu_engine_or_names_the_target_to_take(
    gpu: vulkan.Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLCPIPE_CACHE", str(tmp_path / "cache"))  # where no driver passed the self-test yet
    tried: list[str] = []
    compare = self_test._compare
    monkeypatch.setattr(self_test, "_compare", lambda case, *others: tried.append(case.name) or compare(case, *others))
    checkpoint = write_llama(tmp_path / "checkpoint", TinyLlama(intermediate_size=128))
    bundle = _bundle(tmp_path, "gpu", _MODEL, checkpoint, kv_cache_dtype="f16")
    if "cooperativeMatrix8x8x8" not in gpu.features:
        with pytest.raises(TargetError, match="needs cooperativeMatrix.*, which is missing on") as refused:
            Engine(bundle)
        suited = suited_target(gpu.vendor_id, gpu.limits)
        assert str(refused.value).endswith(f"compile the model with --target {suited}")
        return
    tokens = list(range(70))  # a tile of rows, and a part of one
    expected = Engine(_bundle(tmp_path, "cpu", _EXACT, checkpoint)).logits(tokens)
    found = Engine(bundle).logits(tokens)
    assert "matrices" in tried
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-2 * float(np.abs(expected).max()))
