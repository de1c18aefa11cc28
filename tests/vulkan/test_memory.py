"""Buffers: what goes in comes out, what is freed is used again, what cannot be is refused before it is tried."""

from __future__ import annotations

import numpy as np
import pytest

from mlcpipe.devices import vulkan
from tests.vulkan.conftest import Compiled
from tests.vulkan.gpu import assign, copied, download, empty, upload
from tests.vulkan.kernels import ADD, INCREMENT


@pytest.mark.parametrize("count", [1, 3, 1000, 1 << 20, 5_000_001])
@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_numbers_come_back(gpu: vulkan.Device, count: int, dtype: str) -> None:
    values = np.random.default_rng(count).integers(0, 255, count).astype(dtype)
    tensor = upload(values)
    np.testing.assert_array_equal(download(tensor), values)
    copy = copied(tensor)
    del tensor
    np.testing.assert_array_equal(download(copy), values)


def test_an_upload_waits_for_kernels_before_it(compiled: Compiled, gpu: vulkan.Device) -> None:
    """Small and large uploads into a buffer that launches still use: each launch sees what was there at its turn."""
    module = compiled([ADD, INCREMENT])
    for count in (1000, 3_000_000):
        groups = -(-count // 64)
        source, total = upload(np.zeros(count, np.float32)), upload(np.zeros(count, np.float32))
        for step in range(1, 6):
            assign(source, np.full(count, step, np.float32))
            module["add"](total, source, total, count, 1.0, groups, 64)
        assert (download(total) == 15).all()


def test_a_tensor_larger_than_the_device_allows_is_refused(gpu: vulkan.Device) -> None:
    before = vulkan.counts(gpu)
    most = gpu.limits["max_buffer_bytes"]
    with pytest.raises(MemoryError, match=r"vulkan: a tensor of .* is larger than .* allows: .*max(Storage|Memory)"):
        empty((most + 16,), "uint8")
    with pytest.raises(MemoryError, match="is larger than"):
        empty((1 << 50,), "uint8")
    assert vulkan.counts(gpu) == before
