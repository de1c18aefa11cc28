"""Khronos' tools on kernels: each module once, however many models have it."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from mlcpipe.compiler.backends.spirv.kernel import Kernel

_TOOLS = ("spirv-val", "spirv-opt")
AVAILABLE = all(shutil.which(tool) for tool in _TOOLS)
needs_tools = pytest.mark.skipif(not AVAILABLE, reason="spirv-val and spirv-opt are missing: Debian's spirv-tools")
_valid: set[str] = set()  # digests of code that passed in this process


def check(found: Sequence[Kernel], folder: Path) -> None:
    """Every module is valid, alone and after all optimizations of spirv-opt."""
    assert found
    new = {hashlib.sha256(kernel.code).hexdigest(): kernel for kernel in found}
    new = {digest: kernel for digest, kernel in new.items() if digest not in _valid}
    path, optimized = folder / "kernel.spv", folder / "kernel.opt.spv"
    for digest, kernel in new.items():
        path.write_bytes(kernel.code)
        _tool(kernel.name, "spirv-val", "--target-env", "vulkan1.2", str(path))
        _tool(kernel.name, "spirv-opt", "--target-env=vulkan1.2", "-O", str(path), "-o", str(optimized))
        _tool(kernel.name, "spirv-val", "--target-env", "vulkan1.2", str(optimized))
        _valid.add(digest)


def _tool(name: str, *command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, f"{name}: {done.stderr[:1000]}"
