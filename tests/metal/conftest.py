"""Our device API for Metal with an emulated GPU, compiled once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.metal import emulation


@pytest.fixture(scope="session")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library; tests that need it skip where it cannot be made."""
    if reason := emulation.missing():
        pytest.skip(reason)
    return emulation.build_runtime(tmp_path_factory.mktemp("runtime"))
