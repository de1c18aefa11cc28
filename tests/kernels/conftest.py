"""Devices on which kernels run, each found, built or emulated by its own folder."""

from __future__ import annotations

from tests.cuda.conftest import cuda_device, nvrtc
from tests.metal.conftest import runtime
from tests.vulkan.conftest import gpu, plugin

__all__ = ["cuda_device", "gpu", "nvrtc", "plugin", "runtime"]
