"""Schedules for subgroups of a known size, each on a device, and for sizes that no device here has, as valid SPIR-V."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlcpipe.runtime import vulkan
from tests.vulkan.schedule_cases import CASES, Subgroups
from tests.vulkan.watch import watching


@pytest.mark.parametrize("name", CASES)
def test_a_kernel_whose_lanes_share_x_equals_numpy(gpu: vulkan.Device, name: str) -> None:
    if not gpu.limits["can_require_subgroup_size"]:
        pytest.skip("this device has no VK_EXT_subgroup_size_control")
    CASES[name](Subgroups(max(8, gpu.limits["min_subgroup_size"]), shuffled=True))


def test_kernels_for_16_lanes_equal_numpy(gpu: vulkan.Device) -> None:
    """Octets and subgroups that share columns, which subgroups of 8 lanes cannot have; every lane loads its x."""
    if gpu.kind != "software":
        pytest.skip("only Mesa's software device has subgroups of a size that can be set")
    environment = {**os.environ, **watching(), "LP_NATIVE_VECTOR_WIDTH": "512"}
    command = [sys.executable, "-m", "tests.vulkan.schedule_cases", "16"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
