"""Answers beyond the context: what is dropped, and that an answer is what it would be alone, whatever runs beside it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from mlcpipe import Engine, SamplingParams
from mlcpipe.errors import UsageError
from mlcpipe.runtime.loading import LoadedBundle, load_bundle
from mlcpipe.runtime.serving.batching import Batching
from mlcpipe.runtime.serving.context_shift import tokens_to_drop, without_dropped
from mlcpipe.runtime.serving.cost_model import CostModel
from mlcpipe.runtime.serving.drafting import Lookup
from mlcpipe.runtime.serving.interface import Request, TokenEvent
from mlcpipe.runtime.serving.limits import Limits
from mlcpipe.runtime.serving.page_pool import PageGroup
from mlcpipe.runtime.serving.sequence import Finish
from mlcpipe.runtime.serving.sequence import Sequence as Scheduled
from tests.unit.serving.simulation import Simulation, words

if TYPE_CHECKING:
    from tests.conftest import Bundles

CONTEXT = 128
KINDS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=3),
    SamplingParams(temperature=0.9, top_p=0.9, seed=4, repetition_penalty=1.1, presence_penalty=0.3),
)


@pytest.mark.parametrize("context", [64, 65, 100, 128, pytest.param(1024, marks=pytest.mark.everything)])
def test_a_text_that_grows_keeps_its_first_page_and_its_last_tokens(context: int) -> None:
    """At any length it has what it would have if it came at once."""
    kept: list[int] = []
    for count in range(1, 5 * context):
        kept.append(count)
        kept = without_dropped(kept, tokens_to_drop(len(kept), context))
        assert kept == without_dropped(range(1, count + 1), tokens_to_drop(count, context))
        assert kept[:16] == list(range(1, min(16, count) + 1)) and kept[-1] == count
        assert len(kept) == count or context // 2 <= len(kept) < context


def alone(sequence: Scheduled, groups: tuple[PageGroup, ...], limits: Limits) -> list[int]:
    """What is left of prompt and answer where nothing runs beside it."""
    simulation = Simulation(tuple(replace(group, pages=512) for group in groups), limits, checked=False)
    again = simulation.submit(sequence.request.tokens, sequence.request.max_tokens, shifts=True)
    simulation.run()
    return again.tokens


@pytest.mark.parametrize(
    "groups", [(PageGroup(256),), (PageGroup(20),), (PageGroup(40), PageGroup(24, 40))], ids=["room", "few", "windows"]
)
@pytest.mark.parametrize(
    "seed",
    [
        0,
        pytest.param(1, marks=pytest.mark.full),
        *(pytest.param(seed, marks=pytest.mark.everything) for seed in range(2, 6)),
    ],
)
def test_an_answer_beyond_the_context_is_that_alone(groups: tuple[PageGroup, ...], seed: int) -> None:
    """In a simulation where a row finds what its tables lead to; with preemption, cancels and prompts that are shared."""
    rng, limits = random.Random(seed), Limits(CONTEXT, prefill_chunk=48, sequences=6)
    simulation = Simulation(groups, limits)
    shared, everybody = words(rng, 60), []
    for index in range(12):
        prompt = shared[: rng.randint(0, 60)] + words(rng, rng.randint(1, 60))
        rest = {"priority": rng.choice((-1, 0, 1)), "deterministic": True, "shifts": True}
        everybody.append(simulation.submit(prompt, rng.choice((20, 200, 400)), **rest))
        if index % 5 == 4:
            simulation.cancel(rng.choice(everybody))
        for _ in range(rng.randint(0, 30)):
            simulation.step()
    simulation.run()
    for sequence in everybody:
        if simulation.ends[sequence][0] is not Finish.CANCELLED:
            assert sequence.tokens == alone(sequence, groups, limits)
            assert len(simulation.times[sequence]) == sequence.request.max_tokens == sequence.answer
            assert sequence.dropped == tokens_to_drop(len(sequence.request.tokens) + sequence.answer - 1, CONTEXT)
    assert max(one.dropped for one in everybody) > 3 * CONTEXT // 2
    assert simulation.scheduler.totals.preemptions > 0 or groups[0].pages == 256
    assert all(counts.used == 0 for counts in simulation.pool.counts())


def test_a_lookup_forgets_what_the_context_lost() -> None:
    lookup = Lookup()
    assert lookup.propose([1, 2, 3, 9, 1, 2, 3]).tokens[:1] == [9]
    lookup.restart()
    assert lookup.propose([5, 6, 7, 1, 2, 3]).tokens == []
    assert lookup.propose([5, 6, 7, 1, 2, 3, 5, 6, 7]).tokens == [1, 2, 3, 5, 6, 7]


@pytest.fixture(scope="module")
def bundle(demo_bundles: Bundles) -> LoadedBundle:
    return load_bundle(demo_bundles["q4f16_1"], CONTEXT, 2)


@pytest.fixture(scope="module")
def engine(bundle: LoadedBundle) -> Iterator[Batching]:
    made = Batching(bundle, kv_tokens=3 * CONTEXT, context_shift=True)
    made._scheduler.cost = CostModel(learn=False)  # else drafts are checked where they save time on this machine
    yield made
    made.close()


def requests() -> list[Request]:
    """Of which the last one's prompt is longer than the context."""
    lengths = 5, 40, 100, 300
    return [
        Request([5 + (7 * i + index) % 1900 for i in range(length)], 290, KINDS[index % 3], logprobs=1)
        for index, length in enumerate(lengths)
    ]


def told(events: list[TokenEvent]) -> list[tuple[int | None, float | None]]:
    return [(event.token, event.logprob) for event in events]


def test_long_answers_together_are_those_alone(bundle: LoadedBundle, engine: Batching) -> None:
    """With drafts and pages that do not suffice for all, token by token, with their probabilities."""
    plain = Batching(bundle, kv_tokens=CONTEXT, context_shift=True, drafts=False)
    answers = [list(plain.submit(one)) for one in requests()]
    plain.close()
    with engine.together:
        streams = [engine.submit(replace(one, deterministic=True)) for one in requests()]
    assert [told(list(stream)) for stream in streams] == [told(answer) for answer in answers]
    assert engine.stats().preemptions and engine.stats().accepted
    for request, answer in zip(requests(), answers):
        total = len(request.tokens) + len(answer)
        assert len(answer) == 290 and answer[-1].dropped == tokens_to_drop(total - 1, CONTEXT) > CONTEXT
    assert len({event.token for event in answers[1]}) > 20, "an answer at temperature 1 that only repeats itself"


def test_after_a_shift_comes_what_a_new_prompt_of_the_kept_tokens_gets(engine: Batching) -> None:
    request = replace(requests()[1], sampling=KINDS[0], deterministic=True)
    answer = list(engine.submit(request))
    tokens = [*request.tokens, *(event.token for event in answer if event.token is not None)]
    shifts = [at for at in range(41, len(tokens)) if tokens_to_drop(at, CONTEXT) > tokens_to_drop(at - 1, CONTEXT)]
    assert len(shifts) > 3
    for at in shifts:
        kept = without_dropped(tokens[:at], tokens_to_drop(at, CONTEXT))
        after = told(answer[at - 40 :][:30])
        assert told(list(engine.submit(replace(request, tokens=kept, max_tokens=len(after))))) == after


def test_one_conversation_answers_as_the_server_does(demo_bundles: Bundles, engine: Batching) -> None:
    """And its statistics say what was dropped."""
    single = Engine(demo_bundles["q4f16_1"], context_length=CONTEXT, threads=2, context_shift=True)
    for request in requests():
        single.reset()
        found = single.generate(request.tokens, sampling=request.sampling, max_tokens=290, ignore_eos=True)
        events = list(engine.submit(replace(request, deterministic=True)))
        assert found.token_ids == [event.token for event in events]
        assert found.stats.dropped_tokens == events[-1].dropped
        assert found.stats.completion_tokens == 290 and found.finish_reason == "length"


def test_without_the_option_the_context_ends_an_answer(demo_bundles: Bundles, bundle: LoadedBundle) -> None:
    plain = Batching(bundle, kv_tokens=CONTEXT)
    assert len(list(plain.submit(requests()[1]))) == CONTEXT - 40
    with pytest.raises(UsageError):
        plain.submit(requests()[3])
    plain.close()
    with pytest.raises(UsageError, match="too short to shift"):
        Engine(demo_bundles["q4f16_1"], context_length=32, threads=2, context_shift=True)
