"""Families with keys and values in codes, against those with a float32 cache."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import mlcpipe
from mlcpipe.runtime.engine import Engine
from tests.conftest import QUICK
from tests.models import tiny

CASES = {case.id: case for cases in tiny.tiny_checkpoints().values() for case in cases}
FAMILIES = ("gemma2", "gemma3_text", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3")  # experts change by steps


@pytest.mark.parametrize(
    "name", [pytest.param(f"{n}-default", marks=() if n == "phi3" else pytest.mark.everything) for n in FAMILIES]
)
@pytest.mark.full
def test_errors_of_q4_are_those_of_its_steps(name: str, tmp_path: Path) -> None:
    """A step of q4 is 127 / 8 = 16 times one of q8, and so is its error, as long as that is small against the logits.

    It is up to half of them with these random weights, whose scores are far apart. Chunks change sums of q4 alone.
    """
    checkpoint, rows = tiny.write_tiny(CASES[name], tmp_path / "checkpoint"), {}
    for dtype in ("f32", "q8", "q4"):
        options = {"quantization": "q0f32", "kv_cache_dtype": dtype, "context_length": CASES[name].context_length}
        engine = Engine(mlcpipe.compile(checkpoint, target=QUICK, output=tmp_path / dtype, **options), threads=1)
        tokens = tiny.prompt_tokens(CASES[name], 60)
        rows[dtype] = engine.logits(tokens)
        steps = engine.logits_stepwise(tokens, prefill_tokens=30)
    assert np.abs(steps - rows["q4"][29:]).max() < 0.2
    q8, q4 = (np.sqrt(np.square(rows[dtype] - rows["f32"]).mean()) for dtype in ("q8", "q4"))
    assert 4 * q8 < q4 < 32 * q8, (q4, q8)
