"""Chats with the trained hybrid (apps/demo_model/hybrid.py): turns compute what is new, and no reuse or draft changes one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mlcpipe import Engine, SamplingParams
from mlcpipe.runtime.loading import LoadedBundle, load_bundle
from mlcpipe.runtime.sampling_params import CacheMiss
from mlcpipe.runtime.serving.batching import Batching
from mlcpipe.runtime.serving.interface import Request, TokenEvent
from tests.conftest import HYBRID, Bundles
from tests.models.drafted import always_draft

pytestmark = pytest.mark.full
CONTEXT, SCHEME = 768, "q8f16_0"
GREEDY = SamplingParams(temperature=0.0)
QUESTIONS = (
    "Hello!", "Who are you?", "What is a token?", "What is the KV cache?", "thanks", "What is perplexity?",
    "What does top-p do?", "tell me a joke", "What is paged attention?", "What is greedy decoding?",
)  # fmt: skip


@pytest.fixture(scope="module")
def path(hybrid_bundles: Bundles) -> Path:
    return hybrid_bundles[SCHEME]


@pytest.fixture(scope="module")
def bundle(path: Path) -> LoadedBundle:
    return load_bundle(path, CONTEXT, 1)


def chat(engine: Engine, *, forgets: bool, **settings: Any) -> list[Any]:
    """The answers of ten turns; one that `forgets` computes each from the start."""
    messages: list[dict[str, str]] = []
    answers = []
    engine.reset()
    for question in QUESTIONS:
        if forgets:
            engine.reset()
        messages.append({"role": "user", "content": question})
        answers.append(engine.chat(messages, max_tokens=48, **settings))
        messages.append({"role": "assistant", "content": answers[-1].text})
    return answers


def test_ten_turns_compute_what_is_new(path: Path) -> None:
    with Engine(path, context_length=CONTEXT, threads=1, draft="off") as engine:
        fresh, found = (chat(engine, forgets=forgets, temperature=0.0) for forgets in (True, False))
    assert [one.token_ids for one in found] == [one.token_ids for one in fresh]
    known = [0, *(one.stats.prompt_tokens + one.stats.completion_tokens - 1 for one in found[:-1])]
    assert [one.stats.cached_tokens for one in found] == known
    assert [one.stats.cache_miss for one in found] == [CacheMiss("first_prompt")] + [None] * 9
    corpus = "".join(file.read_text("utf-8") for file in sorted(HYBRID.with_name("knowledge").glob("*.txt")))
    assert sum(f"a: {one.text}\n" in corpus for one in found) >= 9 and len({one.text for one in found}) >= 8


def test_chats_share_their_system_prompt(path: Path) -> None:
    """The second starts where the system prompt of the first one ends."""
    system = {"role": "system", "content": " ".join([*QUESTIONS, *QUESTIONS])}
    chats = [[system, {"role": "user", "content": question}] for question in QUESTIONS[1:3]]
    with Engine(path, context_length=CONTEXT, threads=1, draft="off") as engine:
        first, other = (engine.chat(one, temperature=0.0, max_tokens=24) for one in chats)
        one, two = (engine.tokenizer.encode_chat(each) for each in chats)
        engine.reset()
        alone = engine.chat(chats[1], temperature=0.0, max_tokens=24)
    same = next(place for place, (a, b) in enumerate(zip(one, two)) if a != b)
    assert first.stats.cached_tokens == alone.stats.cached_tokens == 0
    assert same > 80 and same - 20 < other.stats.cached_tokens <= same
    assert other.token_ids == alone.token_ids


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 5}], ids=["greedy", "drawn"])
def test_drafts_of_its_own_layer_change_no_turn(
    settings: dict[str, Any], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(path, context_length=CONTEXT, threads=1, draft="off") as plain:
        expected = [one.token_ids for one in chat(plain, forgets=False, **settings)]
    always_draft(monkeypatch)
    with Engine(path, context_length=CONTEXT, threads=1) as drafting:
        assert [one.token_ids for one in chat(drafting, forgets=False, **settings)] == expected
        totals = drafting.model.core.scheduler.totals
    assert (
        totals.drafted > 100 and totals.accepted > (0.5 if settings == {"temperature": 0.0} else 0.2) * totals.drafted
    )


@contextmanager
def served(bundle: LoadedBundle, kv_tokens: int) -> Iterator[Batching]:
    made = Batching(bundle, kv_tokens=kv_tokens, max_sequences=4)
    try:
        yield made
    finally:
        made.close()


def turn(server: Batching, tokens: list[int]) -> list[TokenEvent]:
    return list(server.submit(Request(tokens, 40, GREEDY, stop_ids=frozenset([2]), deterministic=True)))


def test_a_chat_that_was_evicted_returns(bundle: LoadedBundle, path: Path) -> None:
    """Prompts of their own take its pages, its states, or both; with and without them the next turn is the same."""
    with Engine(path, context_length=CONTEXT, threads=1) as engine:
        asked = engine.tokenizer.encode_chat([{"role": "user", "content": " ".join(QUESTIONS)}])
    with served(bundle, CONTEXT) as alone:
        expected = [event.token for event in turn(alone, asked)]
    with served(bundle, CONTEXT) as server:
        assert [event.token for event in turn(server, asked)] == expected
        again = turn(server, asked)
        for number in range(12):
            turn(server, [3 + number] * 160)
        evicted, kept = turn(server, asked), turn(server, asked)
        reasons = server.stats().misses
    assert [[event.token for event in one] for one in (again, evicted, kept)] == [expected] * 3
    assert again[0].cached_tokens == kept[0].cached_tokens == (len(asked) - 1) // 16 * 16
    assert evicted[0].cached_tokens == 0 and evicted[0].cache_miss in (CacheMiss("evicted"), CacheMiss("state_evicted"))
    assert reasons["prompt_differs"] == 12
