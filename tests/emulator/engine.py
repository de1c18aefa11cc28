"""An engine on an emulated GPU, in a process that has the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np


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
