"""The tokens of a job, {"bundle", "prompt", "count", "sampling"}, in several ways that must give the same."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Job = Mapping[str, Any]
PROMPT, LONG = 108, 144  # tokens; decode attention splits more than 128
SAMPLING: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {
        "temperature": 1.5,
        "seed": 4,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.1,
        "logit_bias": {3: 1.0},
    },
}


def job(bundle: Path, way: str) -> dict[str, Any]:
    """A prompt, and tokens until there are `LONG`."""
    return {"bundle": bundle, "prompt": list(range(PROMPT)), "count": LONG - PROMPT, "sampling": SAMPLING[way]}


def chunks(job: Job, *, graphs: bool = True) -> Iterator[Any]:
    """What a new engine says, step by step."""
    from mlcpipe import Engine, SamplingParams

    os.environ["MLCPIPE_CUDA_GRAPHS"] = str(int(graphs))
    engine = Engine(Path(job["bundle"]), device="cuda:0")
    bias = {int(token): value for token, value in job["sampling"].get("logit_bias", {}).items()}
    sampling = SamplingParams(**{**job["sampling"], "logit_bias": bias})
    made: Iterator[Any] = engine.generate(
        job["prompt"], sampling=sampling, max_tokens=job["count"], ignore_eos=True, stream=True
    )
    return made


def tokens(job: Job, *, graphs: bool = True) -> NDArray[np.int64]:
    """As CUDA graphs, or kernel by kernel."""
    return np.array([token for chunk in chunks(job, graphs=graphs) for token in chunk.token_ids])


def interleaved(job: Job) -> NDArray[np.int64]:
    """[token, engine] of two engines in turn."""
    return np.array([[token for one in pair for token in one.token_ids] for pair in zip(chunks(job), chunks(job))])
