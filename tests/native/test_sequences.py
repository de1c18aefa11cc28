"""Sequences of the native runtime share pages, and none sees another's tokens."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.native.conftest import FLAGS, RUNTIME

TRACE = Path(__file__).with_name("sequences_trace.cc")


def test_random_prompts_over_few_pages(tmp_path: Path) -> None:
    compiler = shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("the native runtime's tests need a C++ compiler")
    own = [flag for flag in FLAGS if flag not in ("-shared", "-fPIC")]
    program = tmp_path / "trace"
    command = [compiler, *own, "-D_GLIBCXX_ASSERTIONS", f"-I{RUNTIME}", TRACE, RUNTIME / "sequences.cc", "-o", program]
    subprocess.run(command, check=True)
    for seed in range(3):
        done = subprocess.run([program, "20000", str(seed)], capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr
        found, most = map(int, done.stdout.split())
        assert found > 100_000 and most > 5
