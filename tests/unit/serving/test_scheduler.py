"""Who goes first and who waits, on a virtual clock."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from mlcpipe.bundle import VisionInfo
from mlcpipe.runtime.serving.adapters import Adapter
from mlcpipe.runtime.serving.cost_model import CostModel, Load
from mlcpipe.runtime.serving.limits import Limits
from mlcpipe.runtime.serving.page_pool import PageGroup
from mlcpipe.runtime.serving.scheduler import PATIENCE_S
from mlcpipe.runtime.serving.sequence import State
from mlcpipe.runtime.serving.waiting import AGING_S
from mlcpipe.vision.processors.picture import Picture
from tests.unit.serving.simulation import COSTS, Simulation, alone, first_token_s, until_running, words

RNG = random.Random(7)


def test_a_long_prompt_does_not_stop_the_answers() -> None:
    """The gap between tokens stays below the target and one more page of the prompt."""
    simulation = Simulation((PageGroup(400),), Limits(4096, step_s=0.1))
    talking = [simulation.submit(words(RNG, 50), 400) for _ in range(4)]
    until_running(simulation, *talking)
    simulation.submit(words(RNG, 3000), 5)
    simulation.run()
    page = simulation.cost.seconds(Load(prefill=16))
    gaps = [b - a for one in talking for a, b in zip(simulation.times[one], simulation.times[one][1:])]
    beside = [step for step in simulation.steps if step.decode and step.prefill]
    assert len(beside) > 20 and max(gaps) <= 0.1 + page
    assert sum(rows.rows for step in beside for rows in step.prefill) > 30 * len(beside)  # and the time is used


@pytest.mark.fast_cases("1.0")
@pytest.mark.parametrize("factor", [0.1, 1.0, 4.0])
def test_the_target_holds_on_a_machine_whose_costs_are_learned(factor: float) -> None:
    """A tenth of its steps take up to three times as long, for no reason: the others keep to the target."""
    rng = random.Random(3)
    costs, step_s = tuple(cost * factor for cost in COSTS), 0.1 * factor
    noise = lambda: rng.gauss(1, 0.03) * (rng.uniform(1.5, 3) if rng.random() < 0.1 else 1)  # noqa: E731
    limits = Limits(4096, step_s=step_s)
    simulation = Simulation((PageGroup(1200),), limits, CostModel(), costs=costs, slower=noise, checked=False)
    talking = [simulation.submit(words(RNG, 50), 900) for _ in range(4)]
    until_running(simulation, *talking)
    for _ in range(6):
        simulation.submit(words(RNG, 1500), 3)
    simulation.run()
    beside = [step for step in simulation.steps if len(step.decode) >= 4 and step.prefill]
    exact = CostModel(costs, learn=False)
    seconds = sorted(exact.seconds(step.load) for step in beside[10:])
    assert len(seconds) > 50 and seconds[len(seconds) * 99 // 100] < 1.3 * step_s
    assert seconds[len(seconds) // 2] > 0.7 * step_s  # and the time is used


def test_a_device_slower_than_the_target_still_computes_prompts() -> None:
    simulation = Simulation((PageGroup(400),), Limits(4096, step_s=0.001))
    talking = simulation.submit(words(RNG, 50), 400)
    until_running(simulation, talking)
    other = simulation.submit(words(RNG, 100), 5)
    simulation.run()
    assert [rows.rows for step in simulation.steps for rows in step.prefill if rows.sequence is other] == [16] * 6 + [4]


def test_prompts_are_whole_chunks_where_nobody_answers() -> None:
    simulation = Simulation((PageGroup(400),), Limits(4096, prefill_chunk=512, step_s=0.1))
    simulation.submit(words(RNG, 1500), 1)
    simulation.run()
    assert [[rows.rows for rows in step.prefill] for step in simulation.steps] == [[512], [512], [476]]


def test_nobody_starves() -> None:
    """Against a stream of high-class requests that would fill every place, a low one is served once it is old enough."""
    simulation = Simulation((PageGroup(64),), Limits(400, sequences=2))
    low = simulation.submit(words(RNG, 60), 5, priority=-1)
    for _ in range(600):
        if len(simulation.scheduler.admission.waiting) < 6:
            simulation.submit(words(RNG, 40), 10, priority=1)
        simulation.step()
        if low in simulation.ends:
            break
    assert low in simulation.ends
    assert 2 * AGING_S < simulation.ends[low][1] < 6 * AGING_S


def test_classes_go_in_order_and_arrival_decides_inside_one() -> None:
    simulation = Simulation((PageGroup(64),), Limits(400, sequences=1, prefill_chunk=64))
    simulation.submit(words(RNG, 40), 3, priority=1)
    simulation.step()
    sequences = [simulation.submit(words(RNG, 40), 3, priority=priority) for priority in (-1, 0, 1, 0, 1, -1)]
    simulation.run()
    order = sorted(sequences, key=lambda one: simulation.times[one][0])
    assert [sequences.index(one) for one in order] == [2, 4, 1, 3, 0, 5]


def test_short_prompts_pass_a_long_one_but_not_forever() -> None:
    simulation = Simulation((PageGroup(600),), Limits(8192, prefill_chunk=256))
    long = simulation.submit(words(RNG, 2500), 1)
    simulation.step()
    short = simulation.submit(words(RNG, 100), 1)
    simulation.run()
    assert simulation.ends[short][1] < simulation.ends[long][1]
    assert first_token_s(simulation, short) < 0.5

    own_s = simulation.ends[long][1]
    simulation = Simulation((PageGroup(600),), Limits(8192, prefill_chunk=256))
    long = simulation.submit(words(RNG, 2500), 1)
    shorts = []
    while long not in simulation.ends:
        while len(simulation.scheduler.admission.waiting) < 4:
            shorts.append(simulation.submit(words(RNG, 256), 1))
        simulation.step()
        assert simulation.now < 100 and long.passed_s < PATIENCE_S + 0.5
    assert own_s + PATIENCE_S / 2 < simulation.ends[long][1] < 2 * own_s + PATIENCE_S + 1
    assert sum(one in simulation.ends for one in shorts) > 5


def test_a_prompt_waits_for_another_that_computes_its_beginning() -> None:
    """16 requests with one long beginning compute it once."""
    simulation = Simulation((PageGroup(400),), Limits(2048, prefill_chunk=256))
    system = words(RNG, 1000)
    sequences = [simulation.submit([*system, *words(RNG, 20)], 4) for _ in range(16)]
    other = simulation.submit(words(RNG, 40), 4)
    simulation.run()
    prompt_rows = sum(rows.rows for step in simulation.steps for rows in step.prefill)
    assert prompt_rows <= 1000 + 16 * (20 + 15) + 40
    assert [one.cached for one in sequences] == [0] + [992] * 15
    assert simulation.scheduler.totals.prefix_hits == 15 * 992
    assert first_token_s(simulation, other) < first_token_s(simulation, sequences[0])  # it shares nothing: no waiting


def test_who_waits_for_a_beginning_is_not_lost_with_who_computes_it() -> None:
    simulation = Simulation((PageGroup(400),), Limits(2048, prefill_chunk=256))
    system = words(RNG, 1000)
    first, second, third = (simulation.submit([*system, *words(RNG, 20)], 4) for _ in range(3))
    for _ in range(3):
        simulation.step()
    step = simulation.scheduler.plan(simulation.now)
    assert step is not None and second.leader is third.leader is first
    tokens = simulation.compute(step)
    simulation.cancel(first)
    simulation.cancel(third)
    assert simulation.scheduler.settle(step, tokens, simulation.now) == []
    assert simulation.pool.counts()[0].used == 0
    simulation.run()
    assert second.tokens == alone(second.request, simulation.groups) and second.cached == 768


def test_who_shares_words_but_no_pages_does_not_wait() -> None:
    """Of another namespace, or with other frequencies."""
    for namespaces, recompute_above in ((("a", "b"), None), (("", ""), 310)):
        simulation = Simulation((PageGroup(400),), Limits(2048, prefill_chunk=512), recompute_above=recompute_above)
        system = words(RNG, 300)
        first = simulation.submit([*system, 1, 2], 4, namespace=namespaces[0])
        second = simulation.submit([*system, *words(RNG, 20)], 4, namespace=namespaces[1])
        simulation.step()
        assert second.leader is None and second.state is State.PREFILLING and first.state is State.RUNNING
        simulation.run()
        assert second.cached == 0


def test_a_small_pool_of_a_window_serves_long_prompts() -> None:
    groups = (PageGroup(200), PageGroup(12, 64))
    simulation = Simulation(groups, Limits(2048, prefill_chunk=64))
    sequences = [simulation.submit(words(RNG, 1200), 20) for _ in range(2)]
    simulation.run()
    assert [one.tokens for one in sequences] == [alone(one.request, groups) for one in sequences]


def test_no_step_cuts_a_picture_whose_rows_see_each_other() -> None:
    """Where steps have few rows, where answers leave few, and where pages are short."""
    info = VisionInfo(
        processor="square", settings={}, mean=(0.5,), std=(0.5,), token=1, rows=60, merged=1, numbers=3, width=4,
        page_bytes=1,
    )  # fmt: skip
    picture = Picture(info, (), ())
    limits = Limits(512, prefill_chunk=64, step_s=0.01, whole_pictures=True)
    simulation = Simulation((PageGroup(40),), limits)
    draw = random.Random(5)
    for at in range(24):
        tokens = words(draw, 20)
        for _ in range(draw.randint(1, 3)):
            number = 64 * draw.randint(1, 6)
            tokens = [*tokens, *(-number - row for row in range(draw.randint(1, 5), 60)), *words(draw, 9)]
        simulation.submit(tokens, 1 + at % 7, pictures={1: picture})
    for _ in range(2000):
        if not simulation.step():
            break
    assert len(simulation.ends) == 24
    assert any(rows.begin for step in simulation.steps for rows in step.prefill)
    for step in simulation.steps:
        assert sum(rows.rows for rows in step.prefill) <= 64
        for rows in step.prefill:
            tokens, end = rows.sequence.tokens, rows.begin + rows.rows
            assert end == len(tokens) or tokens[end - 1] >= 0 or tokens[end] >= 0


def test_no_step_has_prompts_with_pictures_beside_prompts_with_adapters() -> None:
    """One forward takes pictures and another one adapters; against a stream of one kind the other kind has its turn."""
    simulation = Simulation((PageGroup(400),), Limits(4096, prefill_chunk=256))
    kinds: list[dict[str, object]] = [{"pictures": {1: None}}, {"adapter": Adapter("a", Path("a"), 0, 1)}, {}]
    first = [simulation.submit(words(RNG, 30), 3, **kind) for kind in (*kinds, *kinds[::-1])]
    for _ in range(60):
        simulation.submit(words(RNG, 30), 1, **kinds[0])
        simulation.step()
        if all(one in simulation.ends for one in first):
            break
    assert all(one in simulation.ends for one in first)
    for step in simulation.steps:
        of = [rows.sequence.request for rows in step.prefill]
        assert not (any(one.pictures for one in of) and any(one.adapter for one in of))
    assert any(len(step.prefill) > 1 for step in simulation.steps)
