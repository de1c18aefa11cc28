"""Kernels through TVM's packed calls: numbers, order, sizes of launches, arguments that are refused."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from mlcpipe.devices import vulkan
from mlcpipe.devices.support import tvm_runtime
from tests.vulkan.conftest import Compiled
from tests.vulkan.gpu import assign, download, sync, times, upload
from tests.vulkan.kernels import ADD, INCREMENT, NUMBER, SUBGROUP, with_extra


@pytest.fixture(scope="module")
def module(compiled: Compiled) -> Any:
    return compiled([ADD, INCREMENT, NUMBER, SUBGROUP])


@pytest.mark.parametrize("count", [1, 63, 64, 65, 1000, 100_003])
def test_a_sum(module: Any, count: int) -> None:
    generator = np.random.default_rng(count)
    a, b = (generator.standard_normal(count, dtype=np.float32) for _ in range(2))
    out = upload(np.zeros(count, np.float32))
    module["add"](upload(a), upload(b), out, count, 0.5, -(-count // 64), 64)
    np.testing.assert_array_equal(download(out), a + np.float32(0.5) * b)


def test_an_empty_launch_does_nothing(module: Any, gpu: vulkan.Device) -> None:
    tensor = upload(np.zeros(4, np.int32))
    before = vulkan.counts(gpu)["dispatches"]
    module["increment"](tensor, 0, 0, 64)
    assert vulkan.counts(gpu)["dispatches"] == before
    assert download(tensor).tolist() == [0] * 4


def test_dependent_launches_run_in_order(module: Any) -> None:
    """1000 times read and write: one lost barrier or batch shows in the count."""
    tensor = upload(np.zeros(5000, np.int32))
    for _ in range(1000):
        module["increment"](tensor, 5000, 79, 64)
    assert (download(tensor) == 1000).all()


def test_barriers_only_where_a_kernel_waits_for_another(module: Any, gpu: vulkan.Device) -> None:
    tensors = [upload(np.zeros(64, np.float32)) for _ in range(6)]
    sync()
    a, b, c, d, e, f = tensors

    def barriers(*calls: tuple[Any, Any, Any]) -> int:
        module["add"](e, e, f, 64, 1.0, 1, 64)
        module["add"](f, f, e, 64, 1.0, 1, 64)  # waits for the former, and so for all before it
        before = vulkan.counts(gpu)["barriers"]
        for x, y, z in calls:
            module["add"](x, y, z, 64, 1.0, 1, 64)
        return vulkan.counts(gpu)["barriers"] - before

    assert barriers((a, b, c), (a, b, d)) == 0  # reads of the same, writes of different buffers
    assert barriers((a, b, c), (c, b, d)) == 1  # reads what was written
    assert barriers((a, b, c), (d, d, a)) == 1  # writes what was read
    assert barriers((a, b, c), (a, b, c)) == 1  # writes what was written
    assert barriers((a, b, c), (c, c, d), (d, d, a), (b, b, c)) == 2  # a barrier is for all that came before it


def test_a_launch_beyond_the_limit_of_workgroups_is_cut(module: Any, gpu: vulkan.Device) -> None:
    count = gpu.limits["max_workgroups"][0] * 2 + 5
    if count > 1 << 20:
        pytest.skip("this device takes so many workgroups that the test would need gigabytes")
    tensor = upload(np.zeros(count, np.uint32))
    module["number"](tensor, count, 1)
    np.testing.assert_array_equal(download(tensor), np.arange(count, dtype=np.uint32))


def test_subgroups_of_a_size(compiled: Compiled, gpu: vulkan.Device) -> None:
    if not gpu.limits["can_require_subgroup_size"]:
        pytest.skip("this device has no VK_EXT_subgroup_size_control")
    size = gpu.limits["min_subgroup_size"]
    module = compiled([with_extra(SUBGROUP, subgroup_size=size)])
    tensor = upload(np.zeros(128, np.uint32))
    module["subgroup"](tensor, 2, 64)
    assert (download(tensor) == size).all()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"subgroup_size": 1024}, "needs subgroups of 1024"),
        ({"shared_bytes": 1 << 24}, "bytes of shared memory"),
        ({"features": ["cooperativeMatrix"]}, "needs cooperativeMatrix, which is missing on"),
    ],
)
def test_what_a_device_cannot_do_is_refused(
    compiled: Compiled, gpu: vulkan.Device, fields: dict[str, Any], words: str
) -> None:
    if "cooperativeMatrix" in gpu.features and "features" in fields:
        pytest.skip("this device has cooperative matrices")
    module = compiled([with_extra(INCREMENT, **fields)])
    with pytest.raises(RuntimeError, match=f"kernel increment .*{words}"):
        module["increment"](upload(np.zeros(4, np.int32)), 4, 1, 64)


def test_arguments_that_do_not_fit_are_refused(module: Any) -> None:
    add, a = module["add"], upload(np.zeros(4, np.float32))
    with pytest.raises(RuntimeError, match="kernel add takes 7 arguments, got 3"):
        add(a, a, a)
    with pytest.raises(RuntimeError, match="got no buffer as argument 1"):
        add(a, 5, a, 4, 1.0, 1, 64)
    with pytest.raises(RuntimeError, match="a tensor that is not on Vulkan"):
        add(a, tvm_runtime.tensor(np.zeros(4, np.float32)), a, 4, 1.0, 1, 64)
    with pytest.raises(RuntimeError, match="got a float where it takes an integer"):
        add(a, a, a, 4.5, 1.0, 1, 64)
    with pytest.raises(RuntimeError, match="takes 32 bits, got 4294967296 as argument 3"):
        add(a, a, a, 1 << 32, 1.0, 1, 64)
    with pytest.raises(RuntimeError, match="another workgroup: 32 threads, not 64"):
        add(a, a, a, 4, 1.0, 1, 32)
    with pytest.raises(RuntimeError, match="impossible extent, -1"):
        add(a, a, a, 4, 1.0, -1, 64)
    with pytest.raises(RuntimeError, match="workgroups along x, at most"):
        add(a, a, a, 4, 1.0, 0xFFFFFFFF, 64)


def test_the_device_measures_time(module: Any) -> None:
    tensor = upload(np.zeros(1 << 20, np.int32))
    began = time.monotonic()
    measured = times(module, "increment", tensor, 1 << 20, 1 << 14, 64, number=3, repeat=4)
    assert len(measured) == 4 and min(measured) > 0 and 3 * sum(measured) < time.monotonic() - began
    assert (download(tensor) == 13).all()  # one call to warm up


def test_all_kernels_compile_at_once(compiled: Compiled, gpu: vulkan.Device) -> None:
    module = compiled([ADD, INCREMENT, NUMBER])
    vulkan.prepare(module, gpu, threads=2)
    made = vulkan.counts(gpu)["pipelines_made"]
    module["increment"](upload(np.zeros(4, np.int32)), 4, 1, 64)
    assert vulkan.counts(gpu)["pipelines_made"] == made
    bad = compiled([ADD, with_extra(INCREMENT, features=["shaderFloat16"], subgroup_size=512)])
    with pytest.raises(vulkan.TargetError, match="kernel increment needs subgroups of 512"):
        vulkan.prepare(bad, gpu, threads=2)


def test_a_steady_step_allocates_nothing(module: Any, gpu: vulkan.Device) -> None:
    """Uploads, launches and downloads of a decode step."""
    a, b, c = (upload(np.zeros(1000, np.float32)) for _ in range(3))
    host = np.ones(1000, np.float32)

    def step() -> None:
        assign(a, host)
        for _ in range(300):
            module["add"](a, b, c, 1000, 1.0, 16, 64)
        assert download(c)[0] == 1

    step()
    before = vulkan.counts(gpu)
    for _ in range(3):
        step()
    after = vulkan.counts(gpu)
    changed = {name for name, count in after.items() if count != before[name]}
    assert changed <= {"dispatches", "copies", "submits", "barriers", "uploaded_bytes", "downloaded_bytes"}
    assert after["dispatches"] - before["dispatches"] == 900
