"""The wheel for this machine, and the device that it may run on."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
from filelock import FileLock

from tests.once import shared_work
from tests.vulkan.conftest import gpu, plugin
from wheels import build

__all__ = ["gpu", "plugin", "wheel"]


@pytest.fixture(scope="session")
def wheel(shared: Path) -> Path:
    """Built by the first of all workers."""
    folder = shared / "wheels"
    with FileLock(f"{folder}.lock"), shared_work():
        if not folder.exists():
            build.build([platform.machine()], folder)
    (found,) = folder.glob("*.whl")
    return found
