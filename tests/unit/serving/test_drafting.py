"""Drafts from texts at hand: what is proposed, how much of it is checked, and that no answer changes."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest

from mlcpipe.runtime.sampler import Row
from mlcpipe.runtime.sampling_params import SamplingParams
from mlcpipe.runtime.serving import scheduler
from mlcpipe.runtime.serving.cost_model import CostModel, Load
from mlcpipe.runtime.serving.draft_model import DraftSource, ModelDrafter
from mlcpipe.runtime.serving.drafting import MOST_DRAFTED, Draft, Lookup, Search
from mlcpipe.runtime.serving.limits import Limits
from mlcpipe.runtime.serving.page_pool import PageGroup
from mlcpipe.runtime.serving.sequence import ScheduledRequest
from tests.unit.serving.simulation import COSTS, VOCAB, Simulation, alone, words

LIMITS = Limits(400, prefill_chunk=64, sequences=8)


def answer_to(prompt: list[int], groups: tuple[PageGroup, ...]) -> list[int]:
    """Prompt and answer of 60 tokens, alone and without drafts."""
    return alone(ScheduledRequest(tuple(prompt), 60), groups)


class Oracle:
    """Knows the answer, and errs where it should."""

    def __init__(self, answer: list[int], rate: float, seed: int = 0) -> None:
        rng = random.Random(seed)
        self._tokens = [token if rng.random() < rate else VOCAB + 1 for token in answer]
        self._rate = rate
        self.drafted = self.right = 0

    def propose(self, tokens: list[int]) -> Draft:
        return Draft(self._tokens[len(tokens) : len(tokens) + MOST_DRAFTED], self._rate)

    def checked(self, drafted: int, right: int) -> None:
        self.drafted, self.right = self.drafted + drafted, self.right + right


def test_the_longest_match_is_continued_and_of_several_the_latest() -> None:
    text = [1, 2, 3, 4, 50, 9, 3, 4, 60, 8, 3, 4, 70, 1, 2, 3, 4]
    assert Lookup().propose(text).tokens[:2] == [50, 9]
    assert Lookup().propose([5, 3, 4, 60, 8, 3, 4, 70, 6, 3, 4]).tokens == [70, 6, 3, 4]
    for nothing in ([], [3], [4, 1, 4], [1, 2, 3, 4]):
        assert Lookup().propose(nothing).tokens == []


def test_a_prediction_is_the_first_draft_and_is_found_again_after_a_change() -> None:
    prediction, prompt = list(range(100, 140)), [1, 2, 3]
    lookup = Lookup(prediction)
    assert lookup.propose(prompt).tokens == prediction[:MOST_DRAFTED]
    lookup.checked(3, 2)
    answer = [*prompt, 100, 101, 7]
    assert lookup.propose(answer).tokens == []
    assert lookup.propose([*answer, 104, 105]).tokens == prediction[6 : 6 + MOST_DRAFTED]
    lookup.checked(5, 5)
    assert lookup.predicted == (7, 1)
    assert lookup.propose([*answer, 104, 105, 1, 2]).tokens[:1] == [3]
    lookup.checked(5, 1)
    assert lookup.predicted == (7, 1), "this draft was of the prompt"


def test_no_draft_goes_beyond_the_end_of_an_answer_or_what_a_grammar_allows() -> None:
    text = [1, 2, 3, 4, 5, 6, 1, 2]
    assert Lookup(stops=frozenset({5})).propose(text).tokens == [3, 4]
    assert Lookup(stops=frozenset({3})).propose(text).tokens == []
    assert Lookup(allowed=lambda draft: min(len(draft), 3)).propose(text).tokens == [3, 4, 5]


def test_rates_are_learned_from_tokens_that_were_not_drafted_too() -> None:
    for better in (True, False):
        lookup, tokens = Lookup(), [1, 2, 3, 1, 2]
        first = lookup.propose(tokens).rate
        for number in range(6):
            tokens += [3 if better else 10 + number, 1, 2]
            rate = lookup.propose(tokens).rate
        assert (rate > first) == better


def test_looking_for_drafts_stops_where_it_does_not_pay() -> None:
    """And comes back when it does; large models, whose steps are long, always look."""
    search = Search()
    for _ in range(64):
        search.learn(spent=20e-6, saved=0.0, step=20e-3)
        assert search.pays()
    for _ in range(200):
        search.learn(spent=20e-6, saved=0.0, step=200e-6)
    assert [search.pays() for _ in range(32)].count(True) == 2
    search.learn(spent=20e-6, saved=500e-6, step=200e-6)
    for _ in range(4):
        search.learn(spent=20e-6, saved=200e-6, step=200e-6)
    assert all(search.pays() for _ in range(32))


@pytest.mark.parametrize("pays", [False, True])
def test_a_scheduler_looks_as_often_as_that_pays(pays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of its clock take milliseconds, looks of the other one as long or nothing; no answer changes."""
    clock = itertools.count(0.0, 0.0 if pays else 5e-3)
    monkeypatch.setattr(scheduler.time, "perf_counter", lambda: next(clock))
    prompt, groups = words(random.Random(1), 30), (PageGroup(200),)
    simulation, oracle = Simulation(groups, LIMITS), Oracle([], 0.0)
    looks = 0

    def propose(tokens: list[int]) -> Draft:
        nonlocal looks
        looks += 1
        return Draft([], 0.0)

    monkeypatch.setattr(oracle, "propose", propose)
    sequence = simulation.submit(prompt, 200, drafter=oracle)
    simulation.run()
    assert sequence.tokens == alone(ScheduledRequest(tuple(prompt), 200), groups)
    assert (looks > 150) == pays and looks > 64


@pytest.mark.parametrize("block", [1, 4, 8])
@pytest.mark.parametrize("running", [1, 2, 8, 32])
@pytest.mark.parametrize("rate", [0.0, 0.5, 0.7, 1.0])
def test_the_number_of_rows_makes_the_most_tokens_a_second(rate: float, running: int, block: int) -> None:
    """Also where kernels compute blocks of rows, so that one more costs much and the next nothing, and times vary.

    It is found in 150 steps; to try others loses little.
    """
    cost, truth, noise = CostModel(), CostModel(COSTS, learn=False), random.Random(block)
    gains = sorted((rate ** (i + 1) for i in range(MOST_DRAFTED) for _ in range(running)), reverse=True)[:MOST_DRAFTED]

    def seconds(rows: int) -> float:
        return truth.seconds(Load(decode=block * -(-rows // block), decode_keys=100 * rows))

    speeds = [(running + sum(gains[:count])) / seconds(running + count) for count in range(MOST_DRAFTED + 1)]
    made = spent = 0.0
    for step in range(500):
        count = cost.draft_rows(Load(decode=running, decode_keys=100 * running), gains)
        cost.observe(
            Load(decode=running + count, decode_keys=100 * running), seconds(running + count) * noise.gauss(1, 0.03)
        )
        if step >= 150:
            made += running + sum(gains[:count])
            spent += seconds(running + count)
    assert made / spent > 0.93 * max(speeds)
    assert made / spent > 0.98 * speeds[0]


def test_a_slow_moment_does_not_last() -> None:
    """Answers took twice as long for ten steps: drafts, which seem to gain after that, are soon given up."""
    cost, truth = CostModel(), CostModel((2e-3, 2e-3, 2e-3, 1e-3, 1e-6, 0.2e-6), learn=False)
    drafted = []
    for step in range(400):
        slow = 100 <= step < 110
        count = 0 if slow else cost.draft_rows(Load(decode=8, decode_keys=800), [0.7] * 8)
        seconds = truth.seconds(Load(decode=16 if count else 8, decode_keys=800))
        cost.observe(Load(decode=8 + count, decode_keys=800), 2 * seconds if slow else seconds)
        drafted.append(bool(count))
    assert sum(drafted[50:100]) < 6
    assert sum(drafted[150:]) < 25


@pytest.mark.parametrize("running", [8, 16])
def test_what_never_pays_is_tried_less_and_less(running: int) -> None:
    """Rows are computed in blocks of eight, so that any draft doubles a step's time, or adds half of it."""
    cost, noise, made, spent = CostModel(), random.Random(0), 0.0, 0.0
    gains = sorted((0.7 ** (i + 1) for i in range(MOST_DRAFTED) for _ in range(running)), reverse=True)[:MOST_DRAFTED]
    for step in range(1500):
        count = cost.draft_rows(Load(decode=running, decode_keys=800), gains)
        blocks = -(-(running + count) // 8)
        cost.observe(Load(decode=running + count, decode_keys=800), blocks * 16e-3 * noise.gauss(1, 0.05))
        if step >= 200:
            made, spent = made + running + sum(gains[:count]), spent + blocks
    assert made / spent > 0.995 * 8


@pytest.mark.parametrize("running", [8, 16])
def test_a_machine_that_is_slow_at_times_does_not_choose_the_length(running: int) -> None:
    """For half a second of three it takes up to three times as long: drafts that lose stay off."""

    def tokens_per_s(seed: int, drafts: bool) -> float:
        rng, cost, slower, now, change, made = random.Random(seed), CostModel(), 1.0, 0.0, 0.0, 0.0
        while now < 20:
            if now >= change:
                slower = rng.uniform(1.3, 3) if slower == 1.0 else 1.0
                change = now + rng.expovariate(0.4 if slower == 1.0 else 2)
            count = cost.draft_rows(Load(decode=running, decode_keys=800), gains) if drafts else 0
            rows = 8 * -(-(running + count) // 8)  # computed in blocks of 8
            seconds = rows * 2e-3 * slower * noise.gauss(1, 0.05)
            cost.observe(Load(decode=running + count, decode_keys=800), seconds)
            now, made = now + seconds, made + running + sum(gains[:count])
        return made / now

    noise = random.Random(0)
    gains = sorted((0.7 ** (i + 1) for i in range(MOST_DRAFTED) for _ in range(running)), reverse=True)[:MOST_DRAFTED]
    ratios = [tokens_per_s(seed, drafts=True) / tokens_per_s(seed, drafts=False) for seed in range(8)]
    assert sum(ratios) / len(ratios) > 0.95, ratios


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("groups, slots", [
    ((PageGroup(256),), 0), ((PageGroup(30),), 0), ((PageGroup(100), PageGroup(40, 40)), 0), ((PageGroup(60),), 40),
    ((PageGroup(30),), 20),
])  # fmt: skip
def test_answers_are_the_same_with_drafts(rate: float, groups: tuple[PageGroup, ...], slots: int) -> None:
    rng, slow = random.Random(0), random.Random(1)
    simulation = Simulation(groups, LIMITS, slots=slots, redraws=slots > 0, late=lambda: slow.random() < slots / 100)
    oracles, sequences = [], []
    for number in range(12):
        prompt = words(rng, rng.randint(1, 120))
        expected = answer_to(prompt, groups)
        oracles.append(Oracle(expected, rate, number))
        sequences.append((simulation.submit(prompt, 60, drafter=oracles[-1]), expected))
        for _ in range(rng.randint(0, 6)):
            simulation.step()
    simulation.run()
    assert all(sequence.tokens == expected for sequence, expected in sequences)
    totals = simulation.scheduler.totals
    assert totals.drafted == sum(one.drafted for one in oracles) >= totals.accepted == sum(one.right for one in oracles)
    assert bool(totals.drafted) == (rate > 0) and (totals.accepted == totals.drafted) == (rate in (0.0, 1.0))
    assert all(counts.used == 0 for counts in simulation.pool.counts())


def test_drafts_save_steps_where_they_are_right() -> None:
    groups = (PageGroup(256),)
    prompt = words(random.Random(0), 50)
    expected = answer_to(prompt, groups)
    seconds = {}
    for rate in (0.0, 0.7, 1.0):
        simulation = Simulation(groups, LIMITS)
        simulation.submit(prompt, 60, drafter=Oracle(expected, rate))
        simulation.run()
        seconds[rate] = simulation.now
    assert seconds[1.0] < seconds[0.7] / 1.5 < seconds[0.0] / 2.5


class _Source(DraftSource):
    def _load(self, rows: int, keys: int) -> Load:
        return Load(decode=rows)

    def _draft(self, pairs: object, length: int) -> None:
        """Nothing."""


def test_a_rate_is_not_lost_by_chance() -> None:
    """Of drafts of three tokens, each right with 0.7: what is expected stays where drafting pays."""
    for seed in range(20):
        draw = random.Random(seed)
        drafter = ModelDrafter(_Source(CostModel()), Lookup(), Row(SamplingParams(temperature=0.0)))
        for length in range(1, 400):
            drafter.hold([1, 2, 3], length)
            drafter.propose(range(length))
            right = next((at for at in range(3) if draw.random() > 0.7), 3)
            drafter.checked(3, right)
            assert length < 20 or 0.45 < drafter.rate < 0.95, (seed, length)


def test_few_answers_are_followed_where_that_takes_long_and_drafts_are_not_worth_it() -> None:
    """One of 16, the drafts of which may become worth it again. Where it takes little all are, whatever drafts win."""

    def followed(source: _Source, answers: int) -> int:
        """How many of so many answers, each of ten steps of a second."""
        count = 0
        for _ in range(answers):
            drafter = ModelDrafter(source, Lookup(), Row(SamplingParams(temperature=0.0)))
            one = SimpleNamespace(request=SimpleNamespace(drafter=drafter), tokens=[1, 2])
            cost = SimpleNamespace(draft_length=lambda *given: length, decode_seconds=lambda load: 1.0)
            admission, limits = SimpleNamespace(running=[one]), SimpleNamespace(decode_rows=32)
            scheduler: Any = SimpleNamespace(admission=admission, limits=limits, searches=True, cost=cost)
            for _ in range(10):
                source.propose(scheduler)
            count += bool(drafter.followed)
        return count

    sources = {seconds: _Source(CostModel()) for seconds in (0.005, 0.1)}
    for seconds, source in sources.items():
        source._rounds, source._followed_s = 100, seconds  # the costs are known
    length = 0
    assert followed(sources[0.005], 200) == 200
    assert followed(sources[0.1], 50) < 20
    assert followed(sources[0.1], 160) == 10
    length = 3
    followed(sources[0.1], 100)
    assert followed(sources[0.1], 160) == 160
