"""Many requests over few pages and slots, with cancels, forks and preemptions: answers are theirs alone, and nothing is left.

`MLCPIPE_SOAK_REQUESTS=1000 pytest -m everything tests/models/test_soak.py` for as many of each model.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the checkpoints are written by torch")
pytest.importorskip("transformers", reason="the checkpoints are transformers models")

import mlcpipe
from mlcpipe import SamplingParams
from mlcpipe.runtime.loading import LoadedBundle, load_bundle
from mlcpipe.runtime.serving.batching import Batching
from mlcpipe.runtime.serving.interface import Request, Stream
from tests.conftest import QUICK, Bundles
from tests.models import tiny
from tests.models.drafted import always_draft

CONTEXT = 192
REQUESTS = int(os.environ.get("MLCPIPE_SOAK_REQUESTS", "200"))
LATENT, SHARED = (tiny.TinyCase(family, "default") for family in ("deepseek_v3", "gemma4_text"))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((None, 40), id="hybrid", marks=pytest.mark.full),
        pytest.param((None, REQUESTS), id="hybrid-many", marks=pytest.mark.everything),
        pytest.param((LATENT, REQUESTS), id="latent", marks=pytest.mark.everything),
        pytest.param((SHARED, REQUESTS), id="shared-keys", marks=pytest.mark.everything),
    ],
)
def soaked(
    request: pytest.FixtureRequest, hybrid_bundles: Bundles, tmp_path_factory: pytest.TempPathFactory
) -> tuple[LoadedBundle, int]:
    """A bundle, and how many requests it gets; of the trained hybrid, which drafts, or of a random model."""
    case, count = request.param
    if case is None:
        return load_bundle(hybrid_bundles["q8f16_0"], CONTEXT, 2), count
    folder: Path = tmp_path_factory.mktemp("soak")
    made = mlcpipe.compile(
        tiny.write_tiny(case, folder / "checkpoint"), target=QUICK, quantization="q0f32", output=folder / "bundle",
        context_length=CONTEXT,
    )  # fmt: skip
    return load_bundle(made, CONTEXT, 2), count


@contextmanager
def engine(bundle: LoadedBundle, kv_tokens: int, drafts: bool) -> Iterator[Batching]:
    made = Batching(bundle, kv_tokens=kv_tokens, max_sequences=6, max_queue=64, drafts=drafts)
    try:
        yield made
    finally:
        made.close()


def requests(rng: random.Random, count: int, vocab: int) -> list[Request]:
    """Prompts that begin alike, greedy answers and drawn ones; a third take any arithmetic, so they may differ in bits."""
    shared = [[rng.randrange(3, vocab) for _ in range(100)] for _ in range(4)]
    asked = []
    for _ in range(count):
        prompt = rng.choice(shared)[: rng.randint(1, 100)] + [
            rng.randrange(3, vocab) for _ in range(rng.randint(0, 30))
        ]
        sampling = SamplingParams(temperature=rng.choice((0.0, 1.0)), seed=rng.randrange(4))
        exact, priority = rng.random() < 0.67, rng.choice((-1, 0, 0, 1))
        control = sorted(rng.sample(range(len(prompt)), min(3, len(prompt))))  # where messages would end
        asked.append(
            Request(prompt, rng.randint(1, 60), sampling, priority=priority, deterministic=exact, control=control)
        )
    return asked


def rest_of(stream: Stream) -> tuple[list[int], str]:
    """The tokens of an answer, and why it ended."""
    events = list(stream)
    assert all(event.error is None for event in events)
    return [event.token for event in events if event.token is not None], str(events[-1].finish_reason)


def run(server: Batching, asked: list[Request], rng: random.Random) -> list[tuple[list[int], str]]:
    """The answers, some of them cancelled: before they begin, or after some tokens of others."""
    found: list[tuple[list[int], str]] = []
    while len(found) < len(asked):
        part = asked[len(found) : len(found) + rng.randint(1, 16)]
        with server.together:
            streams = [server.submit(request) for request in part]
            leaving = [stream for stream in streams if rng.random() < 0.2]
            early = (len(leaving) + 1) // 2
            for stream in leaving[:early]:
                server.cancel(stream.id)
        for index, stream in enumerate(streams):
            found.append(rest_of(stream))
            if index == len(streams) // 2:
                for late in leaving[early:]:
                    server.cancel(late.id)
    return found


def assert_nothing_is_left(server: Batching) -> None:
    """No unit is used; once the tree gives up what it keeps, all are free, and it is empty. Nor has a draft head any."""
    scheduler, source = server._core.scheduler, server._answers._draft_model
    pools = [(scheduler.pool, scheduler.tree)]
    if source is not None:
        source.propose(scheduler)  # which lets go of answers that have ended
        pools.append((source._pool, source._tree))
        assert not source._followers
    assert not (scheduler.has_work or scheduler.admission.parked or server._answers.answers)
    for pool, tree in pools:
        pool.invariants([])
        tree.invariants()
        assert [each.used for each in pool.counts()] == [0] * len(pool.units)
        assert tree.evict([len(units.idle) for units in pool.units])
        assert [len(units.free) for units in pool.units] == [len(units.uses) for units in pool.units]
        assert not tree.families()


def test_nothing_is_left_and_answers_are_theirs_alone(
    soaked: tuple[LoadedBundle, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, count = soaked
    always_draft(monkeypatch)
    rng = random.Random(count)
    vocab = min(bundle.manifest.model.vocab_size, tiny.TOKENS)
    several = requests(rng, count // 2, vocab)
    asked = [one for one in rng.choices(several, k=count) for _ in range(1 + (rng.random() < 0.35))][:count]  # n = 2
    with engine(bundle, 2 * CONTEXT, drafts=True) as server:
        found, stats = run(server, asked, rng), server.stats()
        assert_nothing_is_left(server)
    assert stats.preemptions and stats.cached and stats.misses.get("evicted", 0) + stats.misses.get("state_evicted", 0)
    assert not bundle.manifest.model.eagle or 0 < stats.accepted < stats.drafted
    alone: dict[int, list[int]] = {}
    with engine(bundle, 6 * CONTEXT, drafts=False) as plain:
        for number, request in enumerate(several):  # in a namespace of its own it finds nothing
            alone[id(request)] = rest_of(plain.submit(replace(request, namespace=str(number))))[0]
    ended = 0
    for request, (tokens, reason) in zip(asked, found):
        assert reason in ("length", "cancelled")
        if request.deterministic:
            assert tokens == alone[id(request)][: len(tokens)]
        ended += reason == "length" and len(tokens) == request.max_tokens
    assert len(found) == count and 0.6 * count < ended < count
