"""The device on which numbers are computed: that of the plugin's tests, watched by the validation layer."""

from __future__ import annotations

from typing import Any

import pytest

from tests.vulkan.conftest import gpu, plugin

__all__ = ["device", "gpu", "plugin"]


@pytest.fixture(scope="session")
def device(gpu: Any) -> None:
    """A Vulkan device in this process; tests that need one skip by name where there is none."""
