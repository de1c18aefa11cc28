"""Our device API for Metal with an emulated GPU, compiled once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.metal import emulation
from tests.once import Once


@pytest.fixture(scope="session")
def runtime(once: Once) -> Path:
    """The library; tests that need it skip where it cannot be made."""
    if reason := emulation.missing():
        pytest.skip(reason)
    return Path(once("emulated-metal", lambda folder: str(emulation.build_runtime(folder))))
