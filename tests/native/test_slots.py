"""Conversations over slots and windows in the native runtime: what is kept of them, and what they continue from."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the checkpoint is written by torch")
pytest.importorskip("transformers", reason="the checkpoint is a transformers model")

import mlcpipe
from mlcpipe import SamplingParams
from tests.conftest import QUICK, Bundles
from tests.models import tiny
from tests.native.engine import CANCELLED, Answer, NativeEngine, NativeError, Runtime, Submitted

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


@pytest.fixture(scope="module", params=[SLOTS, WINDOWS], ids=["slots", "windows"])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("slots")
    return mlcpipe.compile(
        tiny.write_tiny(request.param, folder / "checkpoint"), target=QUICK, quantization="q0f32",
        output=folder / "bundle", context_length=256,
    )  # fmt: skip


@pytest.fixture
def native(bundle: Path, runtime: Runtime, copy_of: Callable[[Path], Path]) -> Open:
    """Opens the bundle."""
    copy = copy_of(bundle)
    return lambda **options: runtime.open(copy, threads=2, **options)


def words(count: int, seed: float = 0) -> list[int]:
    return random.Random(seed).choices(range(3, tiny.TOKENS), k=count)


def alone(engine: NativeEngine, tokens: list[int], max_tokens: int = 10) -> list[int]:
    engine.call("reset")
    return engine.generate(tokens, DRAWN, max_tokens=max_tokens).tokens


def test_conversations_go_on_from_what_python_goes_on_from(bundle: Path, native: Open) -> None:
    """Next turns, other ends, saved chats: tokens and files, where both found as many tokens.

    Python keeps several conversations and cuts prompts at other places, so it may find more of one, or fewer.
    """
    engine, python, draw = native(), mlcpipe.Engine(bundle, threads=2), random.Random(1)
    turns, found = [words(100), words(70, 4)], []
    for _ in range(30):
        tokens = [*draw.choice(turns)]
        if draw.random() < 0.4:
            tokens = [*tokens[: draw.randint(1, len(tokens))], *words(draw.randint(1, 80), draw.random())]
        tokens = tokens[:240]
        answer = engine.generate(tokens, DRAWN, max_tokens=draw.randint(1, 15))
        expected = python.generate(tokens, sampling=DRAWN, max_tokens=len(answer.tokens), ignore_eos=True)
        turns = [*turns[-3:], [*tokens, *answer.tokens, 7]]
        if answer.cached_tokens != expected.stats.cached_tokens:
            engine.call("reset")
            python.reset()
            continue
        assert answer.tokens == expected.token_ids
        found.append(answer.cached_tokens)
        if draw.random() < 0.2:
            files = [bundle.parent / name for name in ("native", "python")]
            engine.save(files[0])
            python.save(files[1])
            assert files[0].read_bytes() == files[1].read_bytes()
            engine.restore(files[1])
            python.load(files[0])
    assert len(found) > 15 and len({*found}) > 4 and max(found) > 100, found


def test_an_answer_that_was_cancelled_is_gone_on_with(native: Open) -> None:
    engine, other, prompt = native(), native(), words(100)
    expected = alone(other, prompt)
    with pytest.raises(NativeError) as caught:
        engine.generate(prompt, DRAWN, max_tokens=10, on_token=lambda token: 1)
    assert caught.value.code == CANCELLED
    assert engine.generate(prompt, DRAWN, max_tokens=10).tokens == expected


def run_together(
    engine: NativeEngine, prompts: list[list[int]], drawn: list[SamplingParams], max_tokens: int = 40
) -> list[Submitted]:
    several = [engine.submit(tokens, how, max_tokens=max_tokens) for tokens, how in zip(prompts, drawn)]
    while engine.step():
        pass
    return several


def test_answers_together(native: Open) -> None:
    """Forks of one prompt, preemption, and checkpoints for the next turns, in few slots."""
    engine, other = native(context_length=240, sequences=4, kv_tokens=240), native()
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
    assert min(found[0][1:3]) >= 64 and max(found[1][:3]) >= 80


def test_drafts_change_no_answer(native: Open) -> None:
    """Answers of three tokens, so that lookups find drafts, right ones and wrong ones; penalties count drafted tokens."""
    few = {"logit_bias": {5: 60.0, 6: 60.0, 7: 60.0}}
    drawn = [SamplingParams(temperature=0.0, **few), SamplingParams(seed=3, **few)]
    drawn += [SamplingParams(temperature=1.0, seed=5, repetition_penalty=1.3, frequency_penalty=0.5, **few)]
    prompts = [words(length, length) for length in (3, 17, 33, 60, 61, 20)]
    found = []
    for draft in ("off", "lookup"):
        engine = native(context_length=240, sequences=4, kv_tokens=480, draft=draft or "")
        several = [engine.submit(one, drawn[at % 3], max_tokens=40) for at, one in enumerate(prompts)]
        while engine.step():
            pass
        found.append([one.tokens for one in several])
        # How many are drafted follows from measured times: test_scheduler.py counts them on a simulated clock.
        drafted, accepted = (
            sum(getattr(one.end, f"{name}_tokens") for one in several) for name in ("drafted", "accepted")
        )
        assert drafted == accepted == 0 if draft == "off" else accepted <= drafted
        again = [engine.submit([*one, *answer, 5], drawn[at % 3], max_tokens=10)
                 for at, (one, answer) in enumerate(zip(prompts, found[-1]))]  # fmt: skip
        while engine.step():
            pass
        found[-1] += [one.tokens for one in again]
    assert found[0] == found[1]


@pytest.mark.parametrize("drawn", [SamplingParams(temperature=0.0), DRAWN], ids=["greedy", "drawn"])
def test_ten_turns_of_the_trained_hybrid(
    drawn: SamplingParams, hybrid_bundles: Bundles, runtime: Runtime, copy_of: Callable[[Path], Path]
) -> None:
    """Each computes what is new, has Python's tokens, and says as Python why no more was reused."""
    bundle, messages = hybrid_bundles["q8f16_0"], list[dict[str, str]]()
    native = runtime.open(copy_of(bundle), threads=1, context_length=768)
    with mlcpipe.Engine(bundle, threads=1, context_length=768, draft="off") as python:
        for number in range(10):
            messages.append({"role": "user", "content": f"What is a token, {number} times?"})
            expected = python.chat(messages, sampling=drawn, max_tokens=30)
            prompt = python.tokenizer.encode_chat(messages)
            found = native.generate(prompt, drawn, max_tokens=30, stop_ids=[2])
            assert (found.tokens, found.cached_tokens) == (expected.token_ids, expected.stats.cached_tokens)
            assert found.cache_miss == (None if number else b"first_prompt")
            messages.append({"role": "assistant", "content": expected.text})
    assert found.cached_tokens > 200


def test_chats_share_their_system_prompt(
    hybrid_bundles: Bundles, runtime: Runtime, copy_of: Callable[[Path], Path]
) -> None:
    """The second starts where Python's does: at the end of the system prompt of the first."""
    bundle = hybrid_bundles["q8f16_0"]
    system = {"role": "system", "content": " ".join(f"What is the page {number} of a cache?" for number in range(12))}
    chats = [[system, {"role": "user", "content": f"What is {what}?"}] for what in ("a token", "a model")]
    with mlcpipe.Engine(bundle, threads=1, context_length=512, draft="off") as python:
        expected = [python.chat(one, sampling=DRAWN, max_tokens=8) for one in chats]
        prompts = [python.tokenizer.encode_chat(one) for one in chats]
    one = runtime.open(copy_of(bundle), threads=1, context_length=512)
    several = runtime.open(copy_of(bundle), threads=1, context_length=512, sequences=2, kv_tokens=1024, draft="off")
    found = [one.generate(prompt, DRAWN, max_tokens=8, stop_ids=[2]) for prompt in prompts]
    (first,), (second,) = (run_together(several, [prompt], [DRAWN], max_tokens=8) for prompt in prompts)
    assert isinstance(second.end, Answer)
    cached = expected[1].stats.cached_tokens
    assert found[1].cached_tokens == second.end.cached_tokens == cached > 80
    assert [one.tokens for one in found] == [one.token_ids for one in expected]
    assert [one.tokens[: len(they.token_ids)] for one, they in zip((first, second), expected)] == [
        they.token_ids for they in expected
    ]


def test_the_head_of_the_trained_hybrid_drafts(
    hybrid_bundles: Bundles, runtime: Runtime, copy_of: Callable[[Path], Path]
) -> None:
    """Its layer that drafts changes no answer, in turns that share pages."""
    bundle = copy_of(hybrid_bundles["q8f16_0"])
    with mlcpipe.Engine(hybrid_bundles["q8f16_0"], threads=1, context_length=512, draft="off") as python:
        chats = [
            [{"role": "user", "content": f"What is {what}?"}] for what in ("a token", "a model", "a cache", "a page")
        ]
        prompts = [python.tokenizer.encode_chat(chat) for chat in chats]
    drawn = [SamplingParams(temperature=0.0), DRAWN, SamplingParams(temperature=0.0, frequency_penalty=0.3), DRAWN]
    found, drafted = [], {}
    for draft in ("off", "lookup", ""):
        engine = runtime.open(bundle, threads=1, context_length=512, sequences=3, kv_tokens=1024, draft=draft)
        # In answers of three tokens texts have nothing that repeats. The first step drafts by the costs that are assumed.
        short = run_together(engine, prompts, drawn, max_tokens=3)
        drafted[draft] = sum(one.end.drafted_tokens for one in short if isinstance(one.end, Answer))
        first = run_together(engine, prompts, drawn)
        again = run_together(engine, [[*one, *answer.tokens, *one[:7]] for one, answer in zip(prompts, first)], drawn)
        found.append([one.tokens for one in [*short, *first, *again]])
    assert found[0] == found[1] == found[2]
    assert drafted["off"] == drafted["lookup"] == 0 < drafted[""]


@pytest.mark.parametrize("bundle", [WINDOWS], indirect=True, ids=["windows"])
def test_a_restored_chat_has_no_more_of_a_window_than_it_sees(native: Open, tmp_path: Path) -> None:
    """Of 150 tokens the pages from the seventh on: what a query after fewer than 135 tokens sees is computed again."""
    engine, other, prompt = native(), native(), words(141)
    answer = alone(engine, prompt)
    engine.save(tmp_path / "chat")
    for length, cached in ((150, 150), (140, 140), (135, 135), (134, 0), (60, 0)):
        engine.restore(tmp_path / "chat")
        tokens = [*[*prompt, *answer][:length], *words(5, length)]
        found = engine.generate(tokens, DRAWN, max_tokens=10)
        assert (found.tokens, found.cached_tokens) == (alone(other, tokens), cached)
