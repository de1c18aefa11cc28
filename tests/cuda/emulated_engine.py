"""A process with the emulated CUDA device: runs the jobs of a JSON file, and writes what came out as <number>.npz.

A job is one of
- {"bundle", "tokens", "prefill", "greedy": [prompt, count]} -> logits all, steps; tokens_after;
- {"library", "calls": [[function, file of its arguments], ...]} -> all tensors after each call, as <call>.<tensor>;
- {"bundle", "prompt", "count", "sampling"} -> tokens of several ways to generate, and `counts` [step, what] of the
  device between them.
"""

from __future__ import annotations

import ctypes
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from tests.cuda import ways
from tests.emulator.engine import run


def main(described: Path, folder: Path) -> None:
    """Run what `described` says."""
    words = json.loads(described.read_text())
    device = [ctypes.CDLL(path, ctypes.RTLD_GLOBAL) for path in words["libraries"]][0]
    for number, job in enumerate(words["jobs"]):
        if "library" in job:
            found = _call(job)
        else:
            found = _generate(job, device) if "count" in job else run(job, "cuda:0")
        np.savez(folder / f"{number}.npz", **found)


def _call(job: dict[str, Any]) -> dict[str, Any]:
    from mlcpipe.devices import cuda
    from mlcpipe.devices.support import tvm_runtime

    device = cuda.choose()
    module = tvm_runtime.load_module(Path(job["library"]))
    found = {}
    for number, (symbol, path) in enumerate(job["calls"]):
        stored = np.load(path)
        values = [stored[i] for i in sorted(stored.files)]
        arguments = [device.tensor(value) if value.ndim else value.item() for value in values]
        module[symbol](*arguments)
        tensors = [argument for argument, value in zip(arguments, values) if value.ndim]
        found |= {f"{number}.{i}": tvm_runtime.array(device.read(tensor)).copy() for i, tensor in enumerate(tensors)}
    return found


def _counts(device: Any) -> list[int]:
    """Launches of graphs, of kernels by themselves, of kernels in graphs, recordings, updates: until now."""
    device.emulated_count.restype = ctypes.c_long
    return [device.emulated_count(which) for which in range(5)]


def _generate(job: dict[str, Any], device: Any) -> dict[str, Any]:
    """The same tokens with graphs, without them, where recordings fail, and by two interleaved engines."""
    counts, seen = [_counts(device)], []
    for chunk in ways.chunks(job):
        seen += chunk.token_ids
        counts.append(_counts(device))
    found = {"tokens": np.array(seen), "counts": np.diff(counts, axis=0), "plain": ways.tokens(job, graphs=False)}
    device.emulated_fail_recordings(3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found["failed"] = ways.tokens(job)
    found["warning"] = np.array([str(one.message) for one in caught])
    return found | {"interleaved": ways.interleaved(job)}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
