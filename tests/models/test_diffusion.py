"""Tiny SDAR and LLaDA 2: logits, and the answers of the published loops, token for token; a compile of each serves all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx2
import numpy as np
import pytest

pytest.importorskip("torch", reason="the references are computed by torch")
pytest.importorskip("transformers", reason="the references are transformers models")

import mlcpipe
from mlcpipe.errors import TargetError, UsageError
from mlcpipe.runtime.loading import load_bundle
from mlcpipe.runtime.serving.batching import Batching
from mlcpipe.runtime.serving.interface import Request
from tests.conftest import QUICK
from tests.models import tiny
from tests.models.denoised import CASE, CONTEXT, EXPERTS, How, generate, logits, write_llada2, write_sdar
from tests.server.conftest import running_server

pytestmark = pytest.mark.full
PROMPT = tiny.prompt_tokens(CASE, 21)
ANSWERS = (
    How(),
    How(block=8, steps=3, threshold=1.0),
    How(block=16, steps=16, threshold=0.2),
    How(block=32, steps=8, threshold=0.3, temperature=0.9, seed=5),
    How(block=64, steps=8, threshold=1.0),
)
EDITS = (  # of LLaDA 2.1
    How(block=32, steps=32, threshold=0.2, editing=0.0, post_steps=2),
    How(block=32, steps=8, threshold=0.3, editing=0.15),
    How(block=16, steps=4, threshold=0.1, temperature=0.8, seed=3, editing=0.1, post_steps=5),
)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdar")
    checkpoint = write_sdar(folder / "checkpoint")
    return mlcpipe.compile(
        checkpoint, target=QUICK, quantization="q0f32", output=folder / "bundle", context_length=CONTEXT
    )


@pytest.fixture(scope="module")
def engine(bundle: Path) -> Iterator[mlcpipe.Engine]:
    with mlcpipe.Engine(bundle) as opened:
        yield opened


def sampling(how: How) -> mlcpipe.SamplingParams:
    return mlcpipe.SamplingParams(
        temperature=how.temperature, top_p=1.0, seed=how.seed, block=how.block, steps=how.steps,
        threshold=how.threshold, editing_threshold=how.editing, max_post_steps=how.post_steps,
    )  # fmt: skip


def request(how: How, prompt: list[int], count: int, **options: object) -> Request:
    return Request(prompt, count, sampling(how), **options)  # type: ignore[arg-type]


def test_rows_see_their_block_and_all_before_it(engine: mlcpipe.Engine) -> None:
    tokens = tiny.prompt_tokens(CASE, 90)
    np.testing.assert_allclose(engine.logits(tokens), logits(tokens, 4), rtol=0, atol=1e-4)


@pytest.mark.parametrize("how", ANSWERS, ids=lambda how: f"{how.block}")
def test_the_published_loop_token_for_token(engine: mlcpipe.Engine, how: How) -> None:
    engine.reset()
    found = engine.generate(PROMPT, sampling=sampling(how), max_tokens=40, ignore_eos=True)
    assert found.token_ids == generate(PROMPT, 40, how)
    assert found.finish_reason == "length"


def test_llada_2_has_the_logits_and_the_answer_of_its_program(tmp_path: Path) -> None:
    bundle = mlcpipe.compile(
        write_llada2(tmp_path / "checkpoint"), target=QUICK, quantization="q0f32", output=tmp_path / "bundle",
        context_length=CONTEXT,
    )  # fmt: skip
    how = How(block=32, steps=32, threshold=0.3)
    with mlcpipe.Engine(bundle) as engine:
        tokens = tiny.prompt_tokens(EXPERTS, 70)
        np.testing.assert_allclose(engine.logits(tokens), logits(tokens, 32, EXPERTS), rtol=0, atol=1e-4)
        found = engine.generate(PROMPT, temperature=0, threshold=how.threshold, max_tokens=30, ignore_eos=True)
        edited = [engine.generate(PROMPT, sampling=sampling(one), max_tokens=30, ignore_eos=True) for one in EDITS]
    assert found.token_ids == generate(PROMPT, 30, how, case=EXPERTS)
    for one, answer in zip(EDITS, edited):
        assert answer.token_ids == generate(PROMPT, 30, one, case=EXPERTS)
        assert answer.token_ids != generate(PROMPT, 30, replace(one, editing=None), case=EXPERTS)


def test_many_with_different_blocks_have_the_bits_of_each_alone(bundle: Path) -> None:
    """In a cache that holds not all of them: some are preempted, and computed again."""
    prompts = [tiny.prompt_tokens(CASE, 9 + 7 * i)[i:] for i in range(6)]
    hows = [How(4), How(8, 4, 0.5), How(32, 8, 0.3, 0.9, 1), EDITS[2], How(64, 8), EDITS[0]]
    batching = Batching(load_bundle(bundle), kv_tokens=CONTEXT + 64)
    try:
        with batching.together:
            streams = [batching.submit(request(how, prompt, 50)) for how, prompt in zip(hows, prompts)]
        together = [[event.token for event in stream] for stream in streams]
        alone = [
            [event.token for event in batching.submit(request(how, prompt, 50, namespace=str(i)))]
            for i, (how, prompt) in enumerate(zip(hows, prompts))
        ]
        assert batching.stats().preemptions > 0
    finally:
        batching.close()
    assert together == alone
    assert [together[1], together[3]] == [generate(prompts[i], 50, hows[i]) for i in (1, 3)]


def test_a_stop_token_inside_of_a_block_ends_the_answer(bundle: Path) -> None:
    how = How(block=16, steps=4, threshold=0.3)
    whole = generate(PROMPT, 40, how)
    stop = next(token for at, token in enumerate(whole) if at >= 5 and token not in whole[:at] and (at + 5) % 16 < 14)
    batching = Batching(load_bundle(bundle), kv_tokens=CONTEXT)
    try:
        events = list(batching.submit(request(how, PROMPT, 40, stop_ids=frozenset({stop}))))
    finally:
        batching.close()
    assert [event.token for event in events] == generate(PROMPT, 40, how, stop)
    assert events[-1].finish_reason == "stop"


def test_finished_blocks_are_found_by_the_next_turn(bundle: Path) -> None:
    """Blocks of two pages: a page is found only with the whole block, as its keys depend on all of it."""
    how = How(block=32, steps=4, threshold=0.3)
    batching = Batching(load_bundle(bundle), kv_tokens=2 * CONTEXT)
    try:
        first = [event.token for event in batching.submit(request(how, PROMPT, 60))]
        turn = [*PROMPT, *first, 5, 6, 7]
        again = list(batching.submit(request(how, turn, 20)))
        differs = [*PROMPT[:20], 3, *first, 5, 6, 7]  # the first page is that of the first turn
        other = list(batching.submit(request(how, differs, 20)))
    finally:
        batching.close()
    assert again[-1].cached_tokens == 64
    assert [event.token for event in again] == generate(turn, 20, how)
    assert other[-1].cached_tokens == 0
    assert [event.token for event in other] == generate(differs, 20, how)


def test_an_answer_comes_block_by_block(engine: mlcpipe.Engine) -> None:
    generation, answer = engine._maker.continuation(PROMPT, sampling(How(8, 8, 1.0)), (), 30, True)
    engine._loop.begin([answer])
    sizes = [len(events) for events in engine._loop.steps(answer)]
    generation.chunks(engine._loop.steps(answer)).close()
    assert sizes == [3, 8, 8, 8, 3]


def test_what_needs_a_next_token_is_refused_by_name(engine: mlcpipe.Engine) -> None:
    for call in (
        lambda: engine.prefill(PROMPT),
        lambda: engine.decode(3),
        lambda: engine.generate(PROMPT, repetition_penalty=1.2),
        lambda: engine.generate(PROMPT, logprobs=2),
        lambda: engine.generate(PROMPT, block=48),
    ):
        with pytest.raises(UsageError, match="denoises blocks|block; expected a divisor of 64"):
            call()


@pytest.mark.everything
def test_a_server_takes_the_settings(bundle: Path, engine: mlcpipe.Engine) -> None:
    settings = {"temperature": 0, "block": 8, "steps": 2, "threshold": 1.0, "max_tokens": 20, "ignore_eos": True}
    with running_server(bundle, "--threads", 2) as server, httpx2.Client(base_url=server.url, timeout=60) as client:
        found = client.post("/v1/completions", json={"prompt": PROMPT, **settings})
        refused = client.post("/v1/completions", json={"prompt": PROMPT, **settings, "logprobs": 2})
    expected = engine.generate(PROMPT, **settings)  # type: ignore[call-overload]
    assert found.json()["choices"][0]["text"] == expected.text
    assert refused.status_code == 400 and "logprobs" in refused.json()["error"]["message"]


def test_a_target_without_the_kernels_is_refused_by_name(bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="no text by diffusion"):
        mlcpipe.compile(bundle.parent / "checkpoint", target="vulkan", quantization="q0f32", output=tmp_path / "vulkan")
