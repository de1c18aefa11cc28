"""A process with the emulated Metal device: runs the jobs of a JSON file, and writes what came out as <number>.npz."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from mlcpipe.devices import metal
from tests.emulator.engine import run
from tests.metal import emulation


def main(described: Path, folder: Path) -> None:
    """jobs: as those of `tests/cuda/emulated_engine.py`."""
    words = json.loads(described.read_text())
    emulation.start(Path(words["runtime"]), folder)
    metal.STAGED_BYTES = 1000  # weights go there in many parts
    for number, job in enumerate(words["jobs"]):
        np.savez(folder / f"{number}.npz", **run(job, "metal:0"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
