"""Which sequences are preempted where pages or places are short, and how they resume, on a virtual clock."""

from __future__ import annotations

import random
from unittest.mock import Mock

import pytest

from mlcpipe.runtime.serving.admission import PROTECTED
from mlcpipe.runtime.serving.cost_model import Load
from mlcpipe.runtime.serving.limits import Limits
from mlcpipe.runtime.serving.page_pool import PageGroup
from mlcpipe.runtime.serving.sequence import Finish, ScheduledRequest, State
from tests.unit.serving.simulation import Simulation, alone, first_token_s, until_running, words

RNG = random.Random(7)


def test_a_higher_class_takes_place_and_pages_of_a_lower_one() -> None:
    for groups, limits in (((PageGroup(64),), Limits(400, sequences=2)), ((PageGroup(12),), Limits(400))):
        simulation = Simulation(groups, limits)
        low = [simulation.submit(words(RNG, 60), 20, priority=-1) for _ in range(2)]
        until_running(simulation, *low)
        high = simulation.submit(words(RNG, 60), 20, priority=0)
        simulation.run()
        assert [one.preemptions for one in low] == [0, 1]  # the younger one
        assert simulation.ends[high][1] < simulation.ends[low[1]][1]
        for one in (*low, high):
            assert one.tokens == alone(one.request, groups)


def test_one_class_does_not_preempt_itself_to_admit() -> None:
    simulation = Simulation((PageGroup(64),), Limits(400, sequences=2))
    first = [simulation.submit(words(RNG, 60), 20) for _ in range(2)]
    until_running(simulation, *first)
    third = simulation.submit(words(RNG, 60), 20)
    simulation.run()
    assert simulation.scheduler.totals.preemptions == 0
    assert first_token_s(simulation, third) > first_token_s(simulation, first[0])


def test_the_preempted_end_and_are_protected_after_three_times() -> None:
    """Answers outgrow the pages all the time; each ends, the oldest first."""
    simulation = Simulation((PageGroup(24),), Limits(400, sequences=6))
    sequences = [simulation.submit(words(RNG, 30), 200) for _ in range(6)]
    simulation.run()
    assert simulation.scheduler.totals.preemptions >= 5
    assert all(simulation.ends[one][0] is Finish.LENGTH and len(simulation.times[one]) == 200 for one in sequences)
    assert sequences[0].preemptions == 0

    simulation = Simulation((PageGroup(40),), Limits(400, sequences=2))
    low = simulation.submit(words(RNG, 60), 200, priority=-1)
    ahead = simulation.submit(words(RNG, 60), 200)
    for _ in range(6):
        until_running(simulation, low, ahead)
        simulation.submit(words(RNG, 40), 3, priority=1)
        while len(simulation.scheduler.admission.waiting) == 1 and simulation.step():
            pass
        simulation.step()
        while low.state is not State.RUNNING and simulation.step():
            pass
        if low.preemptions == PROTECTED:
            break
    assert low.preemptions == PROTECTED
    high = simulation.submit(words(RNG, 40), 3, priority=1)
    simulation.run()
    assert low.preemptions == PROTECTED and ahead.preemptions == 1
    assert len(simulation.times[high]) == 3


def test_who_gave_way_three_times_does_not_for_answers_that_grow() -> None:
    """Else a low class would end only when the stream of others does."""
    simulation, rng = Simulation((PageGroup(14),), Limits(400, sequences=8)), random.Random(1)
    admission = simulation.scheduler.admission
    low = simulation.submit(words(rng, 30), 150, priority=-1)
    while low not in simulation.ends:
        others = len(admission.waiting) - (low.state is State.WAITING)
        if len(admission.running) + len(admission.prefilling) < 3 and not others:
            simulation.submit(words(rng, 20), rng.randint(20, 120))
        simulation.step()
    assert low.preemptions == PROTECTED and simulation.scheduler.totals.preemptions > PROTECTED
    assert simulation.now < 25


def test_a_preempted_sequence_finds_its_pages_again() -> None:
    simulation = Simulation((PageGroup(64),), Limits(400, sequences=1))
    low = simulation.submit(words(RNG, 160), 40, priority=-1)
    until_running(simulation, low)
    simulation.submit(words(RNG, 40), 3, priority=1)
    simulation.run()
    prompt_rows = [rows.rows for step in simulation.steps for rows in step.prefill if rows.sequence is low]
    again = [len(rows.tokens) for step in simulation.steps for rows in step.decode if rows.sequence is low]
    assert low.preemptions == 1 and sum(prompt_rows) == 160 and sum(again) <= 39 + 15


def test_an_answer_that_is_computed_anew_does_not_stop_the_others() -> None:
    """Its few rows cost more than a prompt's; they are as many as the target allows."""
    simulation = Simulation((PageGroup(100),), Limits(2048, sequences=3, step_s=0.2))
    talking = simulation.submit(words(RNG, 50), 700)
    low = simulation.submit(words(RNG, 50), 500, priority=-1)
    until_running(simulation, talking, low)
    while len(low.tokens) < 350:
        simulation.step()
    simulation.submit(words(RNG, 1000), 3, priority=1)
    simulation.run()
    assert low.preemptions == 1
    # So that its pages are not there to be found: the prompt of the higher class took them.
    assert sum(len(rows.tokens) for step in simulation.steps for rows in step.decode if rows.sequence is low) > 600
    gaps = [b - a for a, b in zip(simulation.times[talking], simulation.times[talking][1:])]
    assert max(gaps) <= 0.2 + simulation.cost.seconds(Load(decode=16))


def test_pages_that_others_keep_do_not_stop_a_prompt_for_good() -> None:
    """A prefix that is kept after a prompt was admitted takes the pages that were promised."""
    simulation = Simulation((PageGroup(20),), Limits(400, prefill_chunk=64))
    system = words(RNG, 144)
    simulation.submit(system, 1)
    simulation.run()
    prompt = simulation.submit(words(RNG, 250), 3)
    simulation.step()
    keeper = simulation.pool.sequence(1000, ScheduledRequest((*system, 1), 1))
    assert simulation.tree.take(keeper) == 144
    simulation.tree.pin(keeper)
    simulation.pool.release(keeper)
    simulation.run()
    assert simulation.ends[prompt][0] is Finish.LENGTH and not simulation.tree.pins


def test_kept_prompts_outlive_others_and_go_only_when_nobody_else_can() -> None:
    simulation = Simulation((PageGroup(20),), Limits(400))
    system = words(RNG, 64)
    simulation.submit(system, 1, keep=True)
    simulation.run()
    for _ in range(5):
        simulation.submit(words(RNG, 200), 10)
        simulation.run()
    follower = simulation.submit([*system, 1, 2], 3)
    simulation.run()
    assert follower.cached == 64
    whole = simulation.submit(words(RNG, 300), 15)
    simulation.run()
    assert simulation.ends[whole][0] is Finish.LENGTH and not simulation.tree.pins


def test_drafts_go_before_anybody_gives_way() -> None:
    simulation = Simulation((PageGroup(4),), Limits(400))
    sequence = simulation.submit(words(RNG, 40), 24)
    until_running(simulation, sequence)
    while sequence not in simulation.ends:
        sequence.draft = [1999] * 40
        simulation.step()
    assert sequence.preemptions == 0 and len(sequence.tokens) == 64


def test_an_error_while_a_request_is_admitted_loses_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C may come at any time: the request waits on, without the pages that were found for it."""
    groups = (PageGroup(64),)
    simulation, prompt = Simulation(groups, Limits(400)), words(RNG, 60)
    simulation.submit(prompt, 5)
    simulation.run()
    again = simulation.submit(prompt, 5)
    admission = simulation.scheduler.admission
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(admission, "_fits", Mock(side_effect=KeyboardInterrupt))
        simulation.scheduler.plan(1.0)
    assert admission.pool.counts()[0].used == 0 and not again.tables[0] and again.state is State.WAITING
    simulation.run()
    assert again.cached == 48 and again.tokens == alone(again.request, groups)
