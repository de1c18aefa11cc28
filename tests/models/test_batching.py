"""The same request gives the same logits, bit by bit, whatever runs beside it, and however its prompt is cut."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="the checkpoints are written by torch")
pytest.importorskip("transformers", reason="the checkpoints are transformers models")

import mlcpipe
from mlcpipe.bundle.states import slot_bytes
from mlcpipe.runtime.loading import load_bundle
from mlcpipe.runtime.model import LoadedModel
from mlcpipe.runtime.sampler import Row
from mlcpipe.runtime.sampling_params import SamplingParams
from mlcpipe.runtime.serving.sequence import ScheduledRequest
from tests.conftest import QUICK
from tests.models import tiny
from tests.models.stepping import Alone, Steps

CASES = {case.id: case for cases in tiny.tiny_checkpoints().values() for case in cases}
# One family for each kind of block: plain, sliding layers beside others, RoPE by length, experts, states in slots,
# latent vectors.
FAMILIES = (
    "llama-default", "llama-dynamic", "gemma2-softcaps", "gemma3_text-default", "mistral-default", "phi3-longrope",
    "qwen3_moe-default", "lfm2-biases", "gemma4_text-default", "deepseek_v3-default",
)  # fmt: skip
FORMATS = ("q4f16_1-f16", "q8f16_1-q8", "q0f32-f32")
ONE_FORMAT = (
    "llama-dynamic",
    "gemma2-softcaps",
    "mistral-default",
    "phi3-longrope",
    "gemma3_text-default",
    "gemma4_text-default",
    "deepseek_v3-default",
)  # the others: `make test-everything`
LENGTHS = (1, 15, 16, 17, 33, 63, 64, 65, 40, 100)  # borders of pages and of chunks
ANSWER = 20
GREEDY = Row(SamplingParams(temperature=0.0))
pytestmark = pytest.mark.fast_cases("llama-default-q4f16_1-f16")


MODELS = (*(f"{family}-{format}" for family in FAMILIES for format in FORMATS), "mistral-default-q0f32-q4")
SELDOM = {f"{family}-{format}" for family in ONE_FORMAT for format in FORMATS[1:]}
SELDOM |= {"lfm2-biases-q8f16_1-q8"}  # test_slots.py has another quantized model with states in slots
SELDOM |= {"qwen3_moe-default-q0f32-f32", "qwen3_moe-default-q8f16_1-q8"}  # test_experts_apart.py has another mixture
# Layers as Gemma 3's, and states in float32 by float32 weights: test_slots.py.
SELDOM |= {"gemma2-softcaps-q4f16_1-f16", "lfm2-biases-q0f32-f32"}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.everything if name in SELDOM else ()) for name in MODELS],
)
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Alone]:
    family, quantization, kv = request.param.rsplit("-", 2)
    case, folder = CASES[family], tmp_path_factory.mktemp(family)
    path = mlcpipe.compile(
        tiny.write_tiny(case, folder / "checkpoint"), target=QUICK, quantization=quantization,
        kv_cache_dtype=kv, output=folder / "bundle", context_length=case.context_length,
    )  # fmt: skip
    yield Alone.of(load_bundle(Path(path)), LENGTHS, ANSWER)


def test_in_a_batch(alone: Alone) -> None:
    alone.check(Steps(alone.bundle))


def test_beside_prompts_that_come_later_in_other_chunks(alone: Alone) -> None:
    steps = Steps(alone.bundle, limits=replace(Steps(alone.bundle).limits, prefill_chunk=48, step_s=0.05))
    alone.check(steps, stagger=2)
    manifest = alone.bundle.manifest
    if manifest.model.rope_above is None and not slot_bytes(manifest.states):
        assert steps.scheduler.totals.prefix_hits > 0  # prompts that begin alike shared pages


def test_several_answers_to_one_prompt(alone: Alone) -> None:
    """They start from the pages of the first one, and continue in pages of their own."""
    steps, places = Steps(alone.bundle), [index for index in (0, 2, 4, 9) for _ in range(3)]
    sequences = [steps.submit(alone.prompts[index], ANSWER) for index in places]
    steps.run()
    for index, sequence in zip(places, sequences):
        np.testing.assert_array_equal(steps.logits[sequence.id], alone.expected[index], f"prompt {index}")
    whole = [sequence.cached == len(sequence.request.tokens) for sequence in sequences]
    assert whole == [False, True, True] * 4


def test_a_turn_that_begins_like_the_last_one(alone: Alone) -> None:
    """With keys and values that are there, as far as RoPE's frequencies are still the same."""
    model, prompt = LoadedModel(alone.bundle), max(alone.prompts, key=len)
    for length in (len(prompt) // 3, len(prompt) // 2):
        model.prefill(prompt[:length], GREEDY)
    info = alone.bundle.manifest.model
    scheduler = model.core.scheduler
    whole = scheduler.pool.sequence(-1, ScheduledRequest(tuple(prompt), 1))
    shared = scheduler.tree.shared(scheduler.admission.parked[-1], whole)
    assert shared == length or info.rope_above or info.recompute_above
    model.prefill(prompt, GREEDY)
    after = model.read_logits().copy()
    model.reset()
    model.prefill(prompt, GREEDY)
    np.testing.assert_array_equal(after, model.read_logits())


def test_preempted(alone: Alone) -> None:
    """Pages for a third of what all need: some give theirs up, and compute prompt and answer again."""
    needed = sum(len(prompt) + ANSWER for prompt in alone.prompts)
    steps = Steps(alone.bundle, kv_tokens=max(needed // 3, alone.bundle.context_length))
    alone.check(steps)
    if needed // 3 > alone.bundle.context_length:
        assert steps.scheduler.totals.preemptions > 0
