"""Metal kernels one by one, executed on the CPU: products, attention, norms, experts, drawing of tokens."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from . import emulation
from .schedule_cases import CASES


@pytest.fixture(scope="module")
def errors(runtime: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """What each case says, all in one process."""
    folder = tmp_path_factory.mktemp("metal")
    command = [sys.executable, "-m", "tests.metal.schedule_cases", str(runtime), str(folder)]
    done = subprocess.run(command, cwd=emulation.ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found: Mapping[str, str] = json.loads((folder / "errors.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_kernel_equals_numpy(name: str, errors: Mapping[str, str]) -> None:
    assert not errors[name], errors[name]
