"""The compiler of NVIDIA's packages, which needs no GPU, and an NVIDIA GPU."""

from __future__ import annotations

import pytest

from mlcpipe.compiler.backends.nvrtc.nvrtc import Nvrtc, find_nvrtc
from mlcpipe.devices import cuda
from mlcpipe.errors import CompileError, TargetError


@pytest.fixture(scope="session")
def nvrtc() -> Nvrtc:
    """NVRTC; tests that need it skip by name where its packages are missing."""
    try:
        return find_nvrtc()
    except CompileError as error:
        pytest.skip(f"{error.what}: {error.next_step}")


@pytest.fixture(scope="session")
def cuda_device() -> cuda.Device:
    """A GPU; tests that need one skip by name where there is none."""
    try:
        return cuda.choose()
    except TargetError as error:
        pytest.skip(f"needs an NVIDIA GPU: {error}")
