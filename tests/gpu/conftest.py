"""What every kind of GPU must do: whole models on a Vulkan device, Mesa's in software as a rule, and on an NVIDIA GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from mlcpipe.devices.base import Device
from tests.cuda.conftest import cuda_device
from tests.vulkan.conftest import gpu as vulkan_device
from tests.vulkan.conftest import kernels_are_valid, plugin

__all__ = ["cuda_device", "kernels_are_valid", "plugin", "vulkan_device"]


@dataclass(frozen=True)
class Gpu:
    """A device and targets for it: `plain` has float32 activations, `suited` too and knows the device, `half` float16."""

    device: Device
    plain: str
    suited: str
    half: str

    @property
    def kind(self) -> str:
        return self.device.KIND


@pytest.fixture(scope="session", params=["vulkan", "cuda"])
def gpu(request: pytest.FixtureRequest) -> Gpu:
    """A GPU; tests that need one skip by name where there is none."""
    device: Any = request.getfixturevalue(f"{request.param}_device")
    if device.KIND == "cuda":
        return Gpu(device, "cuda-f32", "cuda-f32", device.best_target())
    return Gpu(device, "vulkan", device.best_target(), "vulkan-f16")
