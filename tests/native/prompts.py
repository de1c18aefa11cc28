"""Prompts of ids, and how their answers are drawn."""

from __future__ import annotations

import random

from mlcpipe import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
SETTINGS = {
    "greedy": GREEDY,
    "drawn": SamplingParams(seed=5),
    "large seed": SamplingParams(seed=2**63 + 12345, temperature=1.3, top_k=40, min_p=0.02, top_p=1.0),
    "penalties": SamplingParams(
        seed=9, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3, logit_bias={7: 5.0, 9: -100.0}
    ),
    "greedy penalties": SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=1.0),
}


def prompt(length: int, vocab: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(vocab), k=length)
