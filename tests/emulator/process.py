"""Compilers and engines of emulated devices, each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).parents[2]


def run_compiler(command: Sequence[str]) -> None:
    """Run a compiler; what it says of errors is the assertion's message."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    errors = [line for line in done.stderr.splitlines() if "error" in line]
    assert done.returncode == 0, "\n".join(errors[:5] or [done.stderr[:1000]])


def run_engines(
    module: str, device: Mapping[str, Any], jobs: Sequence[dict[str, Any]], folder: Path
) -> list[dict[str, NDArray[Any]]]:
    """What each job gives in the program `module`, which finds the jobs beside the words for its device."""
    described = folder / "jobs.json"
    described.write_text(json.dumps({**device, "jobs": list(jobs)}, default=str))
    command = [sys.executable, "-m", module, str(described), str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, f"{done.stdout[-1000:]}\n{done.stderr[-3000:]}"
    return [dict(np.load(folder / f"{i}.npz")) for i in range(len(jobs))]
