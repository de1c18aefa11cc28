"""Conversations over slots and windows in the native runtime: what is kept of them, and what they go on from."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the checkpoint is written by torch")
pytest.importorskip("transformers", reason="the checkpoint is a transformers model")

import mlcpipe
from mlcpipe import SamplingParams
from tests.models import tiny
from tests.native.engine import CANCELLED, NativeEngine, NativeError, Runtime

pytestmark = pytest.mark.full  # compiles TVM's runtime
DRAWN = SamplingParams(seed=3)
LAYERS = {"num_hidden_layers": 4}
SLOTS = tiny.TinyCase("lfm2", "slots", {**LAYERS, "full_attn_idxs": [1, 2]})
WINDOWS = tiny.TinyCase(
    "gemma3_text",
    "windows",
    {**LAYERS, "sliding_window": 40, "layer_types": ["sliding_attention", "full_attention"] * 2},
)

Open = Callable[..., NativeEngine]


def compiled(case: tiny.TinyCase, folder: Path) -> Path:
    return mlcpipe.compile(
        tiny.write_tiny(case, folder / "checkpoint"), target="cpu-native", quantization="q0f32", output=folder / "bundle",
        context_length=256,
    )  # fmt: skip


@pytest.fixture(scope="module")
def slots(runtime: Runtime, tmp_path_factory: pytest.TempPathFactory) -> Open:
    """Opens a model with short convolutions."""
    bundle = compiled(SLOTS, tmp_path_factory.mktemp("slots"))
    return lambda **options: runtime.open(bundle, threads=2, **options)


def words(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, tiny.TOKENS), k=count)


def alone(engine: NativeEngine, tokens: list[int], max_tokens: int = 10) -> list[int]:
    engine.call("reset")
    return engine.generate(tokens, DRAWN, max_tokens=max_tokens).tokens


def test_a_conversation_goes_on_from_what_is_kept_of_it(slots: Open) -> None:
    """The last border of pages in the prompt, its end and that of the answer, as long as there is room."""
    engine, other, prompt = slots(), slots(), words(100)

    def cached(tokens: list[int]) -> int:
        answer = engine.generate(tokens, DRAWN, max_tokens=10)
        assert answer.tokens == alone(other, tokens)
        return answer.cached_tokens

    answer = alone(other, prompt)
    assert cached(prompt) == 0
    assert cached([*prompt[:98], *words(5, 1)]) == 96
    assert cached([*prompt, *answer, 5]) == 109
    assert cached([*prompt[:95], *words(5, 2)]) == 0
    engine.call("reset")
    assert cached(prompt) == 0
    assert cached([*prompt, *words(80, 3)]) == 100
    engine.call("reset")
    turns = [prompt, words(70, 4)]
    for turn in range(3):  # two conversations, one after the other
        for i, tokens in enumerate(turns):
            assert cached(tokens) == (len(tokens) - 2 if turn else 0)
            turns[i] = [*tokens, *alone(other, tokens), 7]


def test_an_answer_that_was_cancelled_is_gone_on_with(slots: Open) -> None:
    engine, other, prompt = slots(), slots(), words(100)
    expected = alone(other, prompt)
    with pytest.raises(NativeError) as caught:
        engine.generate(prompt, DRAWN, max_tokens=10, on_token=lambda token: 1)
    assert caught.value.code == CANCELLED
    assert engine.generate(prompt, DRAWN, max_tokens=10).tokens == expected


def test_answers_together(slots: Open) -> None:
    """Forks of one prompt, preemption, and checkpoints for the next turns, in few slots."""
    engine, other = slots(context_length=240, sequences=4, kv_tokens=240), slots()
    prompts = [words(70, 1)] * 3 + [words(count, count) for count in (3, 16, 33, 120)]
    found = []
    for _ in range(2):
        several = [engine.submit(tokens, DRAWN, max_tokens=30) for tokens in prompts]
        while engine.step():
            pass
        for tokens, one in zip(prompts, several):
            assert one.tokens == alone(other, tokens, 30)
        found.append([one.end.cached_tokens for one in several])
        prompts = [[*tokens, *one.tokens, 7] for tokens, one in zip(prompts, several)]
    assert min(found[0][1:3]) >= 64 and min(found[1][:3]) >= 80


def test_a_restored_chat_has_no_more_of_a_window_than_it_sees(runtime: Runtime, tmp_path: Path) -> None:
    """Of 150 tokens the pages from the seventh on: what a query after fewer than 135 tokens sees is computed again."""
    bundle = compiled(WINDOWS, tmp_path)
    engine, other = runtime.open(bundle, threads=2), runtime.open(bundle, threads=2)
    prompt = words(141)
    answer = alone(engine, prompt)
    engine.save(tmp_path / "chat")
    for length, cached in ((150, 150), (140, 140), (135, 135), (134, 0), (60, 0)):
        engine.call("reset")
        engine.restore(tmp_path / "chat")
        tokens = [*[*prompt, *answer][:length], *words(5, length)]
        found = engine.generate(tokens, DRAWN, max_tokens=10)
        assert (found.tokens, found.cached_tokens) == (alone(other, tokens), cached)
