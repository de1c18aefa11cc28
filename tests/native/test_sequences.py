"""Sequences of the native runtime share pages and slots, and none sees another's tokens."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.native.cxx import RUNTIME, Cxx

SOURCES = [Path(__file__).with_name("sequences_trace.cc"), RUNTIME / "sequences.cc", RUNTIME / "units.cc"]


@pytest.mark.parametrize(("slots", "most"), [(0, 6), (2, 2), (4, 3), (8, 4)])
def test_random_prompts_over_few_pages(slots: int, most: int, cxx: Cxx) -> None:
    program = cxx.program(SOURCES)
    for seed in range(3):
        command = [program, "20000", str(seed), str(slots)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr
        found, sequences = map(int, done.stdout.split())
        assert found > 30_000 and sequences >= most
