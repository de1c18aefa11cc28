"""Every kernel case for GPUs on every device that is here, or that stands in for one, against numpy in float64."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlcpipe.compiler.backends.nvrtc.nvrtc import Nvrtc
from mlcpipe.devices import cuda, vulkan
from mlcpipe.targets import load_target
from tests.cuda import emulation as cuda_emulation
from tests.kernels.cases.gated_delta import numbers_of
from tests.kernels.cases.gpu import (
    CASES,
    adapters,
    attention,
    experts,
    matmul,
    norm,
    page_attention,
    route,
    rwkv,
    sampling,
    short_conv,
    ssm_scan,
)
from tests.kernels.cases.gpu import gated_delta as deltas
from tests.kernels.cases.gpu.case import Array
from tests.kernels.cases.short_conv import Part, step_of
from tests.kernels.devices import cuda as nvidia
from tests.kernels.devices import cuda_emulated
from tests.kernels.devices import vulkan as vulkan_device
from tests.once import Once
from tests.vulkan.watch import watching
from tir_schedules.delta_shape import DeltaShape
from tir_schedules.gpu.attention.attend_few import attend_few
from tir_schedules.gpu.attention.key_split import KeySplit
from tir_schedules.gpu.attention.pages import AttentionShape
from tir_schedules.gpu.gated_delta import gated_delta
from tir_schedules.step_layout import POSITION

pytestmark = pytest.mark.full  # devices, drivers, other compilers
ROOT = Path(__file__).parents[2]
TIMEOUT_S = 500
# Only browsers have TVM's cache: Vulkan stands in for them.
OWN_PAGES = [name for name in CASES if name not in attention.CASES]
PAGES = list(page_attention.CASES)
# What the emulated devices run in `make test-full`: one in six of attention and formats, each its own, and one in two of
# those that have neither products nor attention.
_FORMATS = [*PAGES, *matmul.KEPT, *matmul.INTEGERS]
# Of matmuls each runs half: a scheme with few rows on one of the devices, with many on the other; Vulkan runs all.
_MATMULS = [*matmul.PLAIN, *matmul.FEW]
_OTHERS = [
    name for part in (norm, route, sampling, adapters, deltas, short_conv, rwkv, ssm_scan) for name in part.CASES
]
LESS_CUDA = {*_FORMATS, *_MATMULS[1::2], *_OTHERS[1::2]} - {*_FORMATS[1::6]}
LESS_METAL = {*_FORMATS, *_MATMULS[::2], *_OTHERS[::2]} - {*_FORMATS[4::6]}
# Tiles of cooperative matrices: tests/vulkan/test_matrices.py runs those of Vulkan.
ON_VULKAN, ON_CUDA = ([name for name in names if name not in matmul.SIMD_GROUPS] for names in (CASES, OWN_PAGES))
# What subgroups of 8 lanes cannot have: octets, and subgroups that share columns.
LANES_16 = [
    *matmul.PLAIN,
    *matmul.FEW,
    *matmul.KEPT,
    *matmul.INTEGERS,
    *experts.SMALL,
    *attention.DECODE_SMALL,
    *PAGES,
    *norm.CASES,
]
LESS_UNKNOWN = {*PAGES} - {*PAGES[::4]}
# Vulkan has no matrix units here, so those kernels are the same as others but for one. Formats: every second, as
# `emulated_cuda` and `emulated_metal` and the models of tests/gpu have others.
LESS_VULKAN = {*list(matmul.UNITS)[:-3], *list(matmul.KEPT)[::2], *list(matmul.INTEGERS)[::2]}
Errors = Callable[[str], str]


def _in_process(module: str, arguments: list[str], folder: Path, names: list[str], **environment: str) -> None:
    command = [sys.executable, "-m", f"tests.kernels.devices.{module}", *arguments, str(folder), *names]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="session")
def cuda_errors(nvrtc: Nvrtc, once: Once) -> Errors:
    if reason := cuda_emulation.missing():
        pytest.skip(reason)
    return _in_parts(
        once, "cuda-cases", ON_CUDA, LESS_CUDA, lambda names, folder: cuda_emulated.errors(names, nvrtc, folder)
    )


@pytest.fixture(scope="session")
def metal_errors(runtime: Path, once: Once) -> Errors:
    return _in_parts(
        once,
        "metal-cases",
        OWN_PAGES,
        LESS_METAL,
        lambda names, folder: _in_process("metal_emulated", [str(runtime)], folder, names),
    )


def _in_parts(
    once: Once, work: str, names: list[str], less: set[str], run: Callable[[list[str], Path], object]
) -> Errors:
    """The error of a case. The cases of a tier run together, once for all of pytest's workers."""

    def error(name: str) -> str:
        part = [one for one in names if (one in less) == (name in less)]
        return str(once(f"{work}-{name in less}", lambda folder: run(part, folder))[name])

    return error


def _cases(names: list[str], less: set[str]) -> list[Any]:
    return [pytest.param(name, id=name, marks=pytest.mark.everything if name in less else ()) for name in names]


@pytest.fixture(scope="session")
def lanes_16_errors(gpu: vulkan.Device, once: Once) -> Errors:
    if gpu.kind != "software":
        pytest.skip("only Mesa's software device has subgroups of a size that can be set")
    environment = {**watching(), "LP_NATIVE_VECTOR_WIDTH": "512"}
    return _in_parts(
        once,
        "vulkan-16",
        LANES_16,
        set(),
        lambda names, folder: _in_process("vulkan", ["16"], folder, names, **environment),
    )


@pytest.mark.parametrize("name", _cases(ON_VULKAN, LESS_VULKAN))
def test_vulkan_equals_numpy(name: str, gpu: vulkan.Device) -> None:
    if not gpu.limits["can_require_subgroup_size"]:
        pytest.skip("this device has no VK_EXT_subgroup_size_control")
    lanes = max(8, gpu.limits["min_subgroup_size"])
    vulkan_device.check(CASES[name], vulkan_device.knobs(lanes, shuffled=True))


@pytest.mark.parametrize("borders", [(16, 70), (32, 48, 70)])
def test_chunks_of_delta_rules_have_the_bits_of_the_whole_prompt(borders: tuple[int, ...], gpu: vulkan.Device) -> None:
    """Where a prompt is cut between pages."""
    shape = DeltaShape(1, 2, 16, 32, "float32", many=True)
    qkv, ba, *rates, state = numbers_of(shape, [Part(70)])
    module = vulkan_device.module({"main": gated_delta(shape)})

    def computed(ends: tuple[int, ...]) -> tuple[Array, Array]:
        kept, parts, begin = state, [], 0
        for end in ends:
            step = step_of([Part(end - begin, 1 if begin else -1, 1)])
            step[step[POSITION] :][: end - begin] = range(begin, end)
            y = np.full((end - begin, 64), np.nan, np.float32)
            *_, kept, y = vulkan_device.run(module, "main", qkv[begin:end], ba[begin:end], *rates, step, kept, y)
            parts, begin = [*parts, y], end
        return np.concatenate(parts), kept[1]

    for found, expected in zip(computed(borders), computed((70,))):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.everything
@pytest.mark.parametrize("name", matmul.EVERY_KEPT)
def test_vulkan_equals_numpy_in_every_block_format(name: str, gpu: vulkan.Device) -> None:
    vulkan_device.check(matmul.EVERY_KEPT[name], vulkan_device.knobs(8, shuffled=True))


@pytest.mark.parametrize("name", _cases(PAGES, LESS_UNKNOWN))
def test_vulkan_of_unknown_lanes_equals_numpy(name: str, gpu: vulkan.Device) -> None:
    vulkan_device.check(page_attention.CASES[name], load_target("vulkan").schedule)


@pytest.mark.everything
@pytest.mark.parametrize("name", LANES_16)
def test_vulkan_of_16_lanes_equals_numpy(name: str, lanes_16_errors: Errors) -> None:
    assert lanes_16_errors(name) == ""


@pytest.mark.parametrize("name", ON_CUDA)
def test_cuda_equals_numpy(name: str, cuda_device: cuda.Device, nvrtc: Nvrtc) -> None:
    nvidia.check(CASES[name], cuda_device.best_target(), nvrtc)


@pytest.mark.parametrize("name", _cases(ON_CUDA, LESS_CUDA))
def test_emulated_cuda_equals_numpy(name: str, cuda_errors: Errors) -> None:
    assert cuda_errors(name) == ""


@pytest.mark.parametrize("name", _cases(OWN_PAGES, LESS_METAL))
def test_emulated_metal_equals_numpy(name: str, metal_errors: Errors) -> None:
    assert metal_errors(name) == ""


ON_MATRIX_UNITS = [
    *(name for name in page_attention.MANY if "texts" not in name),
    *("few, rows of a sequence", "few, window", "few, softcap in float16, groups of 16", "few, q8", "few, q4"),
    *experts.TILES,
]


@pytest.mark.parametrize("name", ON_MATRIX_UNITS)
def test_cuda_is_on_matrix_units(name: str) -> None:
    assert "mlcpipe.mma" in str(CASES[name].functions(cuda_emulated.TARGET.schedule)["main"])


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8, 16, 32])
def test_blocks_of_decode_fill_a_cuda_device(kv_heads: int) -> None:
    """From 8k tokens on a sequence alone has a workgroup for each of the 128 multiprocessors of an RTX 4090."""
    shape = AttentionShape(4 * kv_heads, kv_heads, 128, "float16", subgroup=32, mma=True)
    split = KeySplit.of(shape, 0, int(cuda_emulated.TARGET.schedule["decode_blocks"]), 4)
    assert split is not None
    for length in (8192, 32768, 131072):
        assert _used(split, length) * kv_heads >= 128, length


@pytest.mark.parametrize("window", [1, 50, 512, 4096, 100_000])
def test_a_window_launches_as_many_parts_as_it_may_have(window: int) -> None:
    split = KeySplit(AttentionShape(4, 1, 128, "float16", subgroup=32), window, 32, 128, 4)
    assert split.most == max(_used(split, keys) for keys in range(1, window + 16))


def _used(split: KeySplit, keys: int) -> int:
    """Parts that `keys` fill, as `KeySplit.bounds` computes them on the device."""
    size = -(-keys // (split.parts * split.granule)) * split.granule
    return -(-keys // size)


def test_query_heads_whose_weights_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="1400 query heads of a KV head"):
        attend_few(AttentionShape(1400, 1, 64, "float16"), 1.0, 0)
