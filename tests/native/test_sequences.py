"""Sequences of the native runtime share pages, and none sees another's tokens."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.native.cxx import RUNTIME, Cxx

SOURCES = [Path(__file__).with_name("sequences_trace.cc"), RUNTIME / "sequences.cc"]


def test_random_prompts_over_few_pages(cxx: Cxx) -> None:
    program = cxx.program(SOURCES)
    for seed in range(3):
        done = subprocess.run([program, "20000", str(seed)], capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr
        found, most = map(int, done.stdout.split())
        assert found > 100_000 and most > 5
