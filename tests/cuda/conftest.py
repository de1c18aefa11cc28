"""The compiler of NVIDIA's packages, which needs no GPU."""

from __future__ import annotations

import pytest

from mlcpipe.compiler.backends.nvrtc.nvrtc import Nvrtc, find_nvrtc
from mlcpipe.errors import CompileError


@pytest.fixture(scope="session")
def nvrtc() -> Nvrtc:
    """NVRTC; tests that need it skip by name where its packages are missing."""
    try:
        return find_nvrtc()
    except CompileError as error:
        pytest.skip(f"{error.what}: {error.next_step}")
