"""Sequences that keep their pages after the answer, for the next turn, until others need them."""

from __future__ import annotations

import random

import pytest

from mlcpipe.runtime.serving.admission import MOST_PARKED
from mlcpipe.runtime.serving.limits import Limits
from mlcpipe.runtime.serving.page_pool import PageGroup
from mlcpipe.runtime.serving.sequence import Finish, Sequence, State
from tests.unit.serving.simulation import Simulation, until_running, words


def turn(simulation: Simulation, tokens: list[int], count: int = 9) -> Sequence:
    return simulation.submit(tokens, count, parks=True, redraws=True)


@pytest.mark.parametrize(
    ("groups", "slots"),
    [((PageGroup(40),), 0), ((PageGroup(40), PageGroup(12, 40)), 0), ((PageGroup(40),), 12)],
    ids=["full", "windows", "slots"],
)
def test_the_next_turn_begins_after_the_last_computed_token(groups: tuple[PageGroup, ...], slots: int) -> None:
    rng = random.Random(3)
    simulation = Simulation(groups, Limits(400, prefill_chunk=64), slots=slots)
    conversations = [words(rng, 37), words(rng, 50)]
    for _ in range(3):
        ended = [turn(simulation, tokens) for tokens in conversations]
        simulation.run()
        conversations = [[*one.tokens, *words(rng, 11)] for one in ended]
    assert [one.cached for one in ended] == [37 + 9 + 11 + 9 - 1, 50 + 9 + 11 + 9 - 1]
    branch = turn(simulation, [*ended[0].tokens[:60], *words(rng, 4)])
    simulation.run()
    assert branch.cached is not None
    whole_pages = len(groups) > 1 or slots  # windows and slots lose what is needed
    assert branch.cached % 16 == 0 if whole_pages else branch.cached == 60
    again = turn(simulation, list(branch.request.tokens))
    simulation.run()
    assert again.tokens == branch.tokens and (whole_pages or again.cached == len(branch.request.tokens) - 1)
    whole = simulation.submit([*ended[1].tokens, 1], 3, deterministic=True)
    simulation.run()
    assert whole.cached is not None and whole.cached % 16 == 0


def test_others_take_the_pages_of_the_one_that_was_parked_first() -> None:
    rng = random.Random(5)
    simulation = Simulation((PageGroup(20),), Limits(320, prefill_chunk=64))
    first, second = (turn(simulation, words(rng, 100)) for _ in range(2))
    simulation.run()
    parked = simulation.scheduler.admission.parked
    assert parked == [first, second]
    turn(simulation, words(rng, 140))
    simulation.run()
    assert first not in parked and second in parked
    running = turn(simulation, words(rng, 300), 15)  # and while it answers
    simulation.run()
    assert parked == [running] and simulation.scheduler.totals.preemptions == 0
    while simulation.scheduler.admission.unpark():
        pass
    assert simulation.pool.counts()[0].used == 0


def test_a_prompt_that_did_not_fit_beside_an_answer_starts_when_that_one_parks() -> None:
    rng = random.Random(6)
    simulation = Simulation((PageGroup(33),), Limits(512, prefill_chunk=512))
    first, second = (turn(simulation, words(rng, 356), 1) for _ in range(2))
    simulation.run()
    assert [one.answer for one in (first, second)] == [1, 1]


def test_a_cancelled_answer_parks_and_one_with_an_error_does_not() -> None:
    rng = random.Random(6)
    simulation = Simulation((PageGroup(64),), Limits(400))
    sequences = [turn(simulation, words(rng, 30), 20) for _ in range(3)]
    until_running(simulation, *sequences)
    waiting = turn(simulation, words(rng, 30), 20)
    for one, finish in zip((*sequences[:2], waiting), (Finish.CANCELLED, Finish.ERROR, Finish.CANCELLED)):
        event = simulation.scheduler.cancel(one, finish)
        simulation.deliver([event] if event else [])
        simulation.check()
    simulation.run()
    assert simulation.scheduler.admission.parked == [sequences[0], sequences[2]]
    for _ in range(MOST_PARKED):
        turn(simulation, words(rng, 5), 2)
        simulation.run()
    assert len(simulation.scheduler.admission.parked) == MOST_PARKED
    assert all(one.state is State.ENDED for one in simulation.scheduler.admission.parked)
