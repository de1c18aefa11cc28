"""Buffers: what goes in comes out, what is freed is used again, what cannot be is refused before it is tried."""

from __future__ import annotations

import numpy as np
import pytest
import tvm

from mlcpipe.runtime import vulkan
from tests.vulkan.kernels import ADD, INCREMENT
from tests.vulkan.test_kernels import Compiled, device, on_gpu


@pytest.mark.parametrize("count", [1, 3, 1000, 1 << 20, 5_000_001])
@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_numbers_come_back(gpu: vulkan.Device, count: int, dtype: str) -> None:
    values = np.random.default_rng(count).integers(0, 255, count).astype(dtype)
    tensor = on_gpu(values)
    np.testing.assert_array_equal(tensor.numpy(), values)
    copy = tvm.runtime.tensor(tensor, device())
    del tensor
    np.testing.assert_array_equal(copy.numpy(), values)


def test_an_upload_waits_for_kernels_before_it(compiled: Compiled, gpu: vulkan.Device) -> None:
    """Small and large uploads into a buffer that launches still use: each launch sees what was there at its turn."""
    module = compiled([ADD, INCREMENT])
    for count in (1000, 3_000_000):
        groups = -(-count // 64)
        source, total = on_gpu(np.zeros(count, np.float32)), on_gpu(np.zeros(count, np.float32))
        for step in range(1, 6):
            source.copyfrom(np.full(count, step, np.float32))
            module["add"](total, source, total, count, 1.0, groups, 64)
        assert (total.numpy() == 15).all()


def test_a_tensor_larger_than_the_device_allows_is_refused(gpu: vulkan.Device) -> None:
    before = vulkan.counts(gpu)
    most = gpu.limits["max_buffer_bytes"]
    with pytest.raises(MemoryError, match=r"vulkan: a tensor of .* is larger than .* allows: .*max(Storage|Memory)"):
        tvm.runtime.empty((most + 16,), "uint8", device())
    with pytest.raises(MemoryError, match="is larger than"):
        tvm.runtime.empty((1 << 50,), "uint8", device())
    assert vulkan.counts(gpu) == before
