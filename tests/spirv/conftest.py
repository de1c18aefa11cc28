"""The device on which numbers are computed."""

from __future__ import annotations

import importlib.util

import pytest


@pytest.fixture(scope="session")
def device() -> None:
    """A Vulkan device in this process; tests that need one skip by name where there is none."""
    if importlib.util.find_spec("mlcpipe.runtime.vulkan") is None:
        pytest.skip("this version has no Vulkan runtime")
    from mlcpipe.errors import MlcpipeError
    from mlcpipe.runtime import vulkan

    try:
        vulkan.load()
        vulkan.choose()
    except MlcpipeError as error:
        pytest.skip(f"no Vulkan device: {error}")
