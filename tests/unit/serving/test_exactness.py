"""The same request gives the same answer whatever runs beside it: in a simulation where a row finds what its tables lead to."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from mlcpipe.runtime.serving.limits import Limits
from mlcpipe.runtime.serving.page_pool import PageGroup
from mlcpipe.runtime.serving.sequence import Finish, ScheduledRequest, Sequence, State
from tests.unit.serving.simulation import VOCAB, Simulation, alone, words

LIMITS = Limits(400, prefill_chunk=64, sequences=8)


def traffic(
    groups: tuple[PageGroup, ...],
    seed: int,
    requests: int,
    recompute_above: int | None = None,
    late: float = 0.0,
    slots: int = 0,
) -> Simulation:
    """Requests that begin alike, of all classes, some of which are cancelled; `checked` after each step.

    Each is `late` in that part of its draws, and not ready in that part of the steps.
    """
    rng = random.Random(seed)
    slow = random.Random(seed)
    simulation = Simulation(
        groups,
        LIMITS,
        recompute_above=recompute_above,
        late=lambda: slow.random() < late,
        slots=slots,
        redraws=late > 0,
    )
    shared = [words(rng, 100) for _ in range(3)]
    everybody: list[Sequence] = []
    for _ in range(requests):
        prompt = rng.choice(shared)[: rng.randint(0, 100)] + words(rng, rng.randint(1, 120))
        stop = frozenset(rng.randrange(VOCAB) for _ in range(5))
        rest = {"priority": rng.choice((-1, 0, 1)), "namespace": rng.choice(("", "a")), "stop_ids": stop}
        rest["ready"] = lambda: slow.random() >= late
        for _ in range(rng.choice((1, 1, 1, 3))):
            everybody.append(simulation.submit(prompt, rng.randint(1, 60), deterministic=True, **rest))
        if rng.random() < 0.2:
            simulation.cancel(rng.choice(everybody))
        for _ in range(rng.randint(0, 6)):
            simulation.step()
    simulation.run()
    for sequence in everybody:
        expected = alone(replace(sequence.request, ready=lambda: True), groups, recompute_above, slots)
        whole = simulation.ends[sequence][0] is not Finish.CANCELLED
        assert sequence.tokens == (expected if whole else expected[: len(sequence.tokens)]), (seed, sequence.id)
    assert all(counts.used == 0 for counts in simulation.pool.counts())
    return simulation


CASES = {
    "room": ((PageGroup(256),), None),
    "few-pages": ((PageGroup(30),), None),
    "windows": ((PageGroup(100), PageGroup(40, 40)), None),
    "all-slide": ((PageGroup(40, 40),), None),
    "longrope": ((PageGroup(40),), 100),
    "three-groups": ((PageGroup(60), PageGroup(40, 40), PageGroup(50, 70)), None),
    "slots": ((PageGroup(60),), None, 20),
    "few-slots": ((PageGroup(60), PageGroup(40, 40)), None, 7),
    "slots-longrope": ((PageGroup(40),), 100, 20),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "seed",
    [
        0,
        pytest.param(1, marks=pytest.mark.full),
        *(pytest.param(seed, marks=pytest.mark.everything) for seed in range(2, 6)),
    ],
)
def test_the_same_request_gives_the_same_answer(case: str, seed: int) -> None:
    groups, recompute_above, *slots = CASES[case]
    simulation = traffic(groups, seed, 25, recompute_above, slots=sum(slots))
    totals = simulation.scheduler.totals
    assert totals.prefix_hits > 0 and (totals.preemptions > 0 or case == "room"), "nothing of interest happened"


@pytest.mark.parametrize("case", ["few-pages", "windows", "longrope", "slots"])
def test_late_draws_change_no_answer(case: str) -> None:
    groups, recompute_above, *slots = CASES[case]
    simulation = traffic(groups, 3, 8, recompute_above, late=0.3, slots=sum(slots))
    assert simulation.scheduler.totals.preemptions > 0, "nothing of interest happened"


@pytest.mark.parametrize("length", [1, 16, 40, 150])
def test_answers_to_one_prompt_compute_it_once(length: int) -> None:
    """Each but one copies the page that the prompt ends in; who is cancelled meanwhile is left out."""
    groups = (PageGroup(100), PageGroup(60, 40))
    simulation = Simulation(groups, LIMITS)
    several = [simulation.submit(words(random.Random(0), length), 20 + index) for index in range(5)]
    simulation.step()
    simulation.cancel(several[2])
    simulation.run()
    assert sum(rows.rows for step in simulation.steps for rows in step.prefill) == length
    copies = [copy for step in simulation.steps for copy in step.copies]
    assert len(copies) == (0 if length % 16 == 0 else 3 * len(groups))
    for one in several[:2] + several[3:]:
        assert one.cached == (0 if one is several[0] else length)
        assert one.tokens == alone(one.request, groups)


def test_without_asking_for_it_answers_of_others_are_reused() -> None:
    """The next turn of a conversation begins where the last answer ended."""
    for deterministic, cached in ((False, 64), (True, 32)):
        simulation = Simulation()
        prompt = words(random.Random(0), 40)
        first = simulation.submit(prompt, 30)
        simulation.run()
        turn = simulation.submit([*first.tokens, 1, 2, 3], 4, deterministic=deterministic)
        simulation.run()
        assert turn.cached == cached


def test_an_answer_that_crosses_the_limit_of_frequencies_is_computed_anew() -> None:
    simulation = Simulation(recompute_above=64)
    sequence = simulation.submit(words(random.Random(0), 60), 20)
    simulation.run()
    assert sequence.decode_from == 65
    recomputed = [rows for step in simulation.steps for rows in step.prefill if rows.begin == 0]
    assert [rows.rows for rows in recomputed] == [60, 65]
    assert sequence.tokens == alone(sequence.request, simulation.groups, 64)
    assert sequence.tokens != alone(sequence.request, simulation.groups)


@pytest.mark.parametrize("length", range(57, 61))
def test_drafts_do_not_cross_the_limit_of_frequencies(length: int) -> None:
    prompt = words(random.Random(0), length)
    simulation = Simulation(recompute_above=64)
    expected = alone(ScheduledRequest(tuple(prompt), 20), simulation.groups, 64)
    sequence = simulation.submit(prompt, 20)
    while sequence not in simulation.ends:
        at = len(sequence.tokens)
        sequence.draft = expected[at : at + 3] if sequence.state is State.RUNNING else []
        simulation.step()
    assert sequence.tokens == expected and sequence.decode_from == 65


def test_a_preempted_answer_is_recomputed_as_decode_rows() -> None:
    """Prompt rows up to the end of the prompt, then rows with decode's arithmetic, and no token is drawn twice."""
    simulation = Simulation((PageGroup(20),), replace(LIMITS, decode_rows=8))
    old = simulation.submit(words(random.Random(1), 100), 100)
    simulation.step()
    young = simulation.submit(words(random.Random(2), 60), 100)
    simulation.run()
    assert young.preemptions and not old.preemptions
    again = [len(rows.tokens) for step in simulation.steps for rows in step.decode if rows.sequence is young]
    assert max(again) > 1 and sum(again) > 99 and max(again) <= 8
    assert young.tokens == alone(young.request, simulation.groups)
    assert len(simulation.times[young]) == 100


@pytest.mark.parametrize("slots", [0, 12])
def test_an_answer_of_one_token_leaves_its_prompt_to_others(slots: int) -> None:
    """The first of equal prompts ends with the token that the others start from."""
    simulation = Simulation(limits=LIMITS, slots=slots)
    prompt = words(random.Random(0), 150)
    several = [simulation.submit(prompt, most) for most in (1, 20, 30)]
    simulation.run()
    assert sum(rows.rows for step in simulation.steps for rows in step.prefill) == len(prompt)
    for one in several:
        assert one.tokens == alone(one.request, simulation.groups, slots=slots)
