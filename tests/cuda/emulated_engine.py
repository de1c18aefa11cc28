"""A process with the emulated CUDA device: runs the jobs of a JSON file, and writes what came out as <number>.npz."""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np


def main(described: Path, folder: Path) -> None:
    """jobs: {"bundle", "tokens", "prefill", "greedy": [prompt, count]} -> logits all, steps; tokens_after."""
    words = json.loads(described.read_text())
    for path in words["libraries"]:
        ctypes.CDLL(path, ctypes.RTLD_GLOBAL)
    for number, job in enumerate(words["jobs"]):
        np.savez(folder / f"{number}.npz", **run(job, "cuda:0"))


def run(job: dict[str, Any], device: str) -> dict[str, Any]:
    """What an engine on a device computes for a job."""
    from mlcpipe import Engine, SamplingParams

    engine = Engine(Path(job["bundle"]), device=device)
    found = {"device": np.array(engine.device)}
    if "tokens" in job:
        found["all"] = engine.logits(job["tokens"])
        found["steps"] = engine.logits_stepwise(job["tokens"], prefill_tokens=job["prefill"])
    if "greedy" in job:
        prompt, count = job["greedy"]
        made = engine.generate(prompt, sampling=SamplingParams(temperature=0.0), max_tokens=count, ignore_eos=True)
        found["tokens_after"] = np.array(made.token_ids)
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
