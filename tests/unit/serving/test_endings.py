"""How requests are refused, end and are cancelled, and that their pages come back."""

from __future__ import annotations

import random

import pytest

from mlcpipe.errors import UsageError
from mlcpipe.runtime.serving.interface import OverloadedError
from mlcpipe.runtime.serving.limits import Limits
from mlcpipe.runtime.serving.page_pool import PageGroup
from mlcpipe.runtime.serving.sequence import Finish, ScheduledRequest, State
from tests.unit.serving.simulation import Simulation, alone, until_running, words

RNG = random.Random(7)


def test_pages_of_a_sequence_with_an_error_are_not_found() -> None:
    simulation = Simulation()
    sequence = simulation.submit(words(RNG, 100), 20)
    until_running(simulation, sequence)
    event = simulation.scheduler.cancel(sequence, Finish.ERROR)
    assert event is not None and event.finish is Finish.ERROR
    simulation.deliver([event])
    again = simulation.submit(list(sequence.request.tokens), 3)
    simulation.run()
    assert again.cached == 0 and simulation.pool.counts()[0].used == 0


def test_a_full_queue_refuses_with_a_time_to_come_back() -> None:
    simulation = Simulation((PageGroup(64),), Limits(400, sequences=1, queue=3))
    running = simulation.submit(words(RNG, 40), 10)
    until_running(simulation, running)
    for _ in range(3):
        simulation.submit(words(RNG, 40), 10)
    with pytest.raises(OverloadedError, match="3 requests wait already; try again in") as caught:
        simulation.submit(words(RNG, 40), 10)
    assert 1 <= caught.value.retry_after_s <= 60
    assert simulation.scheduler.totals.rejected == 1
    simulation.run()
    simulation.submit(words(RNG, 40), 10)
    simulation.run()


@pytest.mark.parametrize("queued", [10, 40])
def test_the_time_to_come_back_follows_how_fast_answers_end(queued: int) -> None:
    simulation = Simulation((PageGroup(64),), Limits(400, sequences=1))
    for _ in range(8):
        simulation.submit(words(RNG, 40), 10)
    simulation.run()
    each_s = simulation.now / 8
    for _ in range(queued):
        simulation.submit(words(RNG, 40), 10)
    assert simulation.scheduler.retry_after_s() == pytest.approx(min(60, queued * each_s), rel=0.3)


def test_what_can_never_be_served_is_refused() -> None:
    simulation = Simulation((PageGroup(10),), Limits(400))
    with pytest.raises(UsageError, match="at most 160 tokens; found 161"):
        simulation.submit(words(RNG, 100), 61)
    simulation.submit(words(RNG, 100), 60)
    with pytest.raises(UsageError, match="the prompt is too long; expected less than 400 tokens; found 400"):
        simulation.submit(words(RNG, 400), 1)
    for wrong in ({"tokens": ()}, {"max_tokens": 0}, {"priority": 2}):
        with pytest.raises(UsageError):
            ScheduledRequest(**{"tokens": (1,), "max_tokens": 1, **wrong})
    simulation.run()


def test_an_answer_ends_at_the_context() -> None:
    simulation = Simulation((PageGroup(64),), Limits(100))
    sequence = simulation.submit(words(RNG, 90), 500)
    simulation.run()
    assert len(sequence.tokens) == 100 and simulation.ends[sequence][0] is Finish.LENGTH


def test_stop_ids_end_an_answer_and_are_part_of_it() -> None:
    prompt = words(RNG, 50)
    expected = alone(ScheduledRequest(tuple(prompt), 20), (PageGroup(64),))
    simulation = Simulation((PageGroup(64),))
    sequence = simulation.submit(prompt, 20, stop_ids=frozenset({expected[60], 2000}))
    simulation.run()
    assert sequence.tokens == expected[: expected.index(expected[60], 50) + 1]
    assert simulation.ends[sequence][0] is Finish.STOP


def test_deadlines_end_who_waits_who_is_computed_and_who_answers() -> None:
    simulation = Simulation((PageGroup(200),), Limits(2000, sequences=2, prefill_chunk=64))
    answering = simulation.submit(words(RNG, 20), 1000, deadline_s=1.0)
    until_running(simulation, answering)
    prefilling = simulation.submit(words(RNG, 1500), 5, deadline_s=0.6)
    simulation.step()
    queued = simulation.submit(words(RNG, 20), 5, deadline_s=0.5)
    never = simulation.submit(words(RNG, 20), 5, deadline_s=1000.0)
    simulation.run()
    for sequence, deadline_s in ((answering, 1.0), (prefilling, 0.6), (queued, 0.5)):
        finish, ended = simulation.ends[sequence]
        assert finish is Finish.TIMEOUT and deadline_s <= ended < deadline_s + 0.25
    assert len(simulation.times[answering]) > 3 and not simulation.times[prefilling] and not simulation.times[queued]
    assert simulation.ends[never][0] is Finish.LENGTH
    assert simulation.pool.counts()[0].used == 0


@pytest.mark.parametrize("state", ["waiting", "prefilling", "running", "in flight", "preempted", "ended"])
def test_a_cancelled_request_gives_every_page_back(state: str) -> None:
    simulation = Simulation((PageGroup(40), PageGroup(40, 40)), Limits(600, sequences=1, prefill_chunk=64))
    sequence = simulation.submit(words(RNG, 150), 30, priority=-1)
    if state == "prefilling":
        simulation.step()
    elif state != "waiting":
        until_running(simulation, sequence)
    if state == "preempted":
        simulation.submit(words(RNG, 30), 5)
        simulation.step()
        assert sequence.state is State.WAITING and sequence.preemptions
    elif state == "ended":
        simulation.run()
    if state == "in flight":
        step = simulation.scheduler.plan(simulation.now)
        assert step is not None
        tokens = simulation.compute(step)
        simulation.cancel(sequence)
        assert simulation.scheduler.settle(step, tokens, simulation.now + 1) == []
    else:
        simulation.cancel(sequence)
    if state != "preempted":
        assert [counts.used for counts in simulation.pool.counts()] == [0, 0]
        assert not simulation.scheduler.has_work
    simulation.run()
    assert simulation.ends[sequence][0] is (Finish.LENGTH if state == "ended" else Finish.CANCELLED)
    assert [counts.used for counts in simulation.pool.counts()] == [0, 0]
    assert simulation.scheduler.cancel(sequence) is None


@pytest.mark.parametrize("right", [0, 1, 3])
def test_drafts_stand_while_they_are_what_would_have_been_drawn(right: int) -> None:
    """The places for drafts: a verified one gives several tokens a step, the others' pages come back."""
    prompt = words(RNG, 46)
    expected = alone(ScheduledRequest(tuple(prompt), 30), (PageGroup(64),))
    simulation = Simulation((PageGroup(64),), Limits(400))
    sequence = simulation.submit(prompt, 30)
    until_running(simulation, sequence)
    while sequence in simulation.times and sequence not in simulation.ends:
        at = len(sequence.tokens)
        sequence.draft = [*expected[at : at + right], *[1999] * (3 - right)][: 76 - at]
        before = len(sequence.tokens)
        simulation.step()
        assert len(sequence.tokens) == min(before + right + 1, 76)
        assert len(sequence.tables[0]) == -(-sequence.computed // 16)
    assert sequence.tokens == expected
    assert simulation.pool.counts()[0].used == 0


def test_requests_that_ended_before_their_deadline_are_forgotten() -> None:
    simulation = Simulation((PageGroup(64),), Limits(400))
    for _ in range(1000):
        simulation.cancel(simulation.submit(words(RNG, 4), 2, deadline_s=1e9))
    assert len(simulation.scheduler._deadlines) < 100
    late = simulation.submit(words(RNG, 4), 200, deadline_s=simulation.now)
    simulation.run()
    assert late.finish is Finish.TIMEOUT
