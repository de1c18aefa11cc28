"""Every family's compiled model against transformers, float32 on the CPU: logits, decoding, greedy tokens.

The families are the files in `mlcpipe/models`; their cases come from `tiny`. One compile serves a case's tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

pytest.importorskip("torch", reason="the references are computed by torch")
pytest.importorskip("transformers", reason="the references are transformers models")

import mlcpipe
from tests.conftest import QUICK
from tests.models import tiny
from tests.models.kinds import new_kinds

CASES = [case for cases in tiny.tiny_checkpoints().values() for case in cases]
TOKENS = 40
PREFILL = 12
# One family for each kind of block: plain, two norms with a window and softcaps, scaled RoPE; experts are in the full tier.
FAST = ("llama-default", "gemma2-softcaps", "phi3-longrope")
# Every family as its class has it, and the options that bring a block or a switch which none before has.
NEW = new_kinds(CASES)
# Families that few run, of blocks that others bring: their own names and sizes are in the tier of all combinations.
FEW_RUN = (
    "cwm", "deepseek_v32", "dots1", "ernie4_5", "exaone_moe", "glm_moe_dsa", "gpt_bigcode", "granitemoeshared", "helium",
    "hunyuan_v1_moe", "hy_v3", "hyperclovax", "mellum", "olmoe", "seed_oss", "solar_open", "vaultgemma", "youtu",
)  # fmt: skip
FULL = [case.id for case in CASES if case in NEW or (case.variant == "default" and case.model_type not in FEW_RUN)]
pytestmark = [pytest.mark.fast_cases(*FAST), pytest.mark.full_cases(*FULL)]
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Built:
    """A case and an engine that runs its compiled checkpoint."""

    case: tiny.TinyCase
    engine: mlcpipe.Engine


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.id)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    """Compiles a case once for all tests of this module."""
    case: tiny.TinyCase = request.param
    folder = tmp_path_factory.mktemp(case.id)
    bundle = mlcpipe.compile(
        tiny.write_tiny(case, folder / "checkpoint"),
        target=QUICK,
        quantization="q0f32",
        output=folder / "bundle",
        context_length=case.context_length,
    )
    yield Built(case, mlcpipe.Engine(bundle))


def test_logits_of_one_prefill(built: Built) -> None:
    tokens = tiny.prompt_tokens(built.case, TOKENS)
    built.engine.reset()
    found = built.engine.logits(tokens)
    expected = tiny.reference_logits(built.case, tokens)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


def test_logits_of_each_decode_step(built: Built) -> None:
    tokens = tiny.prompt_tokens(built.case, TOKENS)
    built.engine.reset()
    found = built.engine.logits_stepwise(tokens, prefill_tokens=PREFILL)
    expected = tiny.reference_stepwise(built.case, tokens, PREFILL)
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


def test_greedy_tokens(built: Built) -> None:
    prompt = tiny.prompt_tokens(built.case, tiny.GREEDY_PROMPT)
    built.engine.reset()
    completion = built.engine.generate(
        prompt, sampling=mlcpipe.SamplingParams(temperature=0), max_tokens=tiny.GREEDY_TOKENS, ignore_eos=True
    )
    assert completion.token_ids == tiny.reference_greedy(built.case, prompt)


def test_greedy_tokens_after_a_longer_prompt(built: Built) -> None:
    """Its first keys are computed with the frequencies of the whole prompt, whose length may be beyond a limit."""
    tokens = tiny.prompt_tokens(built.case, TOKENS)
    built.engine.reset()
    built.engine.generate(tokens, max_tokens=1, ignore_eos=True)
    prompt = tokens[: tiny.GREEDY_PROMPT]
    completion = built.engine.generate(
        prompt, sampling=mlcpipe.SamplingParams(temperature=0), max_tokens=tiny.GREEDY_TOKENS, ignore_eos=True
    )
    assert completion.token_ids == tiny.reference_greedy(built.case, prompt)
