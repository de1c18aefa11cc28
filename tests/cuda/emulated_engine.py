"""A process with the emulated CUDA device: runs the jobs of a JSON file, and writes what came out as <number>.npz.

A job is one of
- {"bundle", "tokens", "prefill", "greedy": [prompt, count]} -> logits all, steps; tokens_after;
- {"library", "calls": {function: file of its arguments}} -> all arguments after each call;
- {"bundle", "prompt", "count", "sampling"} -> tokens of several ways to generate, and `counts` [step, what] of the
  device between them.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


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


def _call(job: dict[str, Any]) -> dict[str, Any]:
    from mlcpipe.runtime import cuda, tvm_runtime
    from mlcpipe.runtime.places import CudaGpu

    place = CudaGpu(cuda.choose())
    module = tvm_runtime.load_module(Path(job["library"]))
    found = {}
    for name, path in job["calls"].items():
        stored = np.load(path)
        values = [stored[i] for i in sorted(stored.files)]
        arguments = [place.tensor(value) if value.ndim else value.item() for value in values]
        module[name](*arguments)
        tensors = [argument for argument, value in zip(arguments, values) if value.ndim]
        found |= {f"{name}.{i}": tvm_runtime.array(place.read(tensor)).copy() for i, tensor in enumerate(tensors)}
    return found


def _counts(device: Any) -> list[int]:
    """Launches of graphs, of kernels by themselves, of kernels in graphs, recordings, updates: until now."""
    device.emulated_count.restype = ctypes.c_long
    return [device.emulated_count(which) for which in range(5)]


def _generate(job: dict[str, Any], device: Any) -> dict[str, Any]:
    """The same tokens with graphs, without them, where recordings fail, and by two engines in turns."""
    from mlcpipe import Engine, SamplingParams

    def engine(graphs: bool = True) -> Engine:
        os.environ["MLCPIPE_CUDA_GRAPHS"] = str(int(graphs))
        return Engine(Path(job["bundle"]), device="cuda:0")

    def chunks(engine: Engine) -> Any:
        bias = {int(token): value for token, value in job["sampling"].get("logit_bias", {}).items()}
        sampling = SamplingParams(**{**job["sampling"], "logit_bias": bias})
        return engine.generate(
            job["prompt"], sampling=sampling, max_tokens=job["count"], ignore_eos=True, stream=True
        )

    def tokens(engine: Engine) -> NDArray[np.int64]:
        return np.array([token for chunk in chunks(engine) for token in chunk.token_ids])

    counts, seen = [_counts(device)], []
    for chunk in chunks(engine()):
        seen += chunk.token_ids
        counts.append(_counts(device))
    found = {"tokens": np.array(seen), "counts": np.diff(counts, axis=0), "plain": tokens(engine(False))}
    device.emulated_fail_recordings(3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found["failed"] = tokens(engine())
    found["warning"] = np.array([str(one.message) for one in caught])
    turns = [[token for one in pair for token in one.token_ids] for pair in zip(chunks(engine()), chunks(engine()))]
    return found | {"turns": np.array(turns)}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
