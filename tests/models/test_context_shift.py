"""Answers beyond the context, of each kind of positions and windows: after a shift as from a new prompt."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="the references are computed by torch")
pytest.importorskip("transformers", reason="the references are transformers models")

import mlcpipe
from mlcpipe.runtime.serving.context_shift import tokens_to_drop, without_dropped
from tests.conftest import QUICK
from tests.models import tiny

CASES = {case.id: case for cases in tiny.tiny_checkpoints().values() for case in cases}
FAMILIES = (
    "llama-default",
    "llama-dynamic",
    "gemma3_text-default",
    pytest.param("mistral-default", marks=pytest.mark.everything),  # windows, as gemma3_text
    "phi3-longrope",
)
GREEDY = mlcpipe.SamplingParams(temperature=0)
CONTEXT = 80
TOLERANCE = 1e-4
pytestmark = pytest.mark.fast_cases("phi3-longrope")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_shifted_answer_is_that_of_transformers_for_what_is_kept(family: str, tmp_path: Path) -> None:
    """Token by token that of new prompts; logits at the shift are those of transformers."""
    case = CASES[family]
    bundle = mlcpipe.compile(
        tiny.write_tiny(case, tmp_path / "checkpoint"), target=QUICK, quantization="q0f32",
        output=tmp_path / "bundle", context_length=CONTEXT,
    )  # fmt: skip
    engine = mlcpipe.Engine(bundle, context_shift=True)
    prompt = tiny.prompt_tokens(case, 24)
    answer = engine.generate(prompt, sampling=GREEDY, max_tokens=150, ignore_eos=True)
    tokens = [*prompt, *answer.token_ids]
    counts = range(len(prompt), len(tokens))
    shifts = [at for at in counts if tokens_to_drop(at, CONTEXT) > tokens_to_drop(at - 1, CONTEXT)]
    assert len(shifts) > 2 and answer.stats.dropped_tokens == tokens_to_drop(len(tokens) - 1, CONTEXT)
    plain = mlcpipe.Engine(bundle)
    for begin, end in zip(shifts, [*shifts[1:], len(tokens)]):
        kept = without_dropped(tokens[:begin], tokens_to_drop(begin, CONTEXT))
        plain.reset()
        found = plain.generate(kept, sampling=GREEDY, max_tokens=end - begin, ignore_eos=True)
        assert found.token_ids == tokens[begin:end]
        expected = tiny.reference_logits(case, kept)[-1]
        np.testing.assert_allclose(plain.logits(kept)[-1], expected, rtol=0, atol=TOLERANCE)
