"""What a step costs is learned from few and noisy measurements, and sensible before."""

from __future__ import annotations

import random

import pytest

from mlcpipe.runtime.serving.cost_model import DEFAULT_COSTS, CostModel, Load

LAPTOP = (15e-3, 2.1e-3, 18e-3, 0.9e-3, 1.1e-6, 0.15e-6)
GPU = (1.2e-3, 20e-6, 2e-3, 15e-6, 2e-9, 1e-9)
BOARD = (0.4, 60e-3, 0.5, 40e-3, 20e-6, 4e-6)
MACHINES = pytest.mark.parametrize("costs", [LAPTOP, GPU, BOARD], ids=["laptop", "gpu", "board"])


def load(rng: random.Random) -> Load:
    """A chunk of a prompt, answers, or both."""
    decode, prefill = rng.choice([(0, 512), (1, 0), (4, 0), (8, 32), (8, 128), (16, 0), (2, 16)])
    return Load(decode, decode * rng.randint(50, 2000), prefill, prefill * rng.randint(20, 1500))


def learned(costs: tuple[float, ...], steps: int, outliers: float = 0.0, seed: int = 0) -> CostModel:
    rng, truth, model = random.Random(seed), CostModel(costs, learn=False), CostModel()
    for _ in range(steps):
        one = load(rng)
        slower = rng.uniform(2, 20) if rng.random() < outliers else 1
        model.observe(one, truth.seconds(one) * rng.gauss(1, 0.05) * slower)
    return model


def worst(model: CostModel, costs: tuple[float, ...]) -> float:
    """The largest factor by which it errs, of many loads."""
    rng, truth = random.Random(99), CostModel(costs, learn=False)
    ratios = [model.seconds(one) / truth.seconds(one) for one in (load(rng) for _ in range(200))]
    return max(max(ratios), 1 / min(ratios))


@MACHINES
def test_a_few_steps_are_enough_to_begin_with(costs: tuple[float, ...]) -> None:
    assert worst(CostModel(), costs) > (1.3 if costs is LAPTOP else 5)
    assert worst(learned(costs, 16), costs) < 1.5


@MACHINES
@pytest.mark.parametrize("outliers", [0.0, 0.15])
def test_outliers_do_not_ruin_it(costs: tuple[float, ...], outliers: float) -> None:
    for seed in range(3):
        assert worst(learned(costs, 400, outliers, seed), costs) < 1.2


def test_a_long_time_of_answers_does_not_drown_what_prompts_cost() -> None:
    model, truth = learned(LAPTOP, 200), CostModel(LAPTOP, learn=False)
    for step in range(3000):
        one = Load(4, 4000 + 4 * (step % 100))
        model.observe(one, truth.seconds(one))
    assert worst(model, LAPTOP) < 1.2


def test_it_follows_a_machine_that_became_slower() -> None:
    model, slow = learned(LAPTOP, 400), tuple(3 * cost for cost in LAPTOP)
    truth, rng = CostModel(slow, learn=False), random.Random(5)
    for _ in range(1500):
        one = load(rng)
        model.observe(one, truth.seconds(one))
    assert worst(model, slow) < 1.25


def test_no_cost_is_negative_and_nothing_breaks_it() -> None:
    rng, model = random.Random(3), CostModel()
    for wrong in (0.0, -1.0, float("inf"), float("nan")):
        model.observe(Load(1, 1), wrong)
    model.observe(Load(), 1.0)
    assert model.costs == DEFAULT_COSTS
    for _ in range(300):  # times that have nothing to do with the loads
        model.observe(load(rng), 10 ** rng.uniform(-4, 2))
        assert all(cost >= 0 for cost in model.costs) and any(model.costs)


@pytest.mark.parametrize("learn", [False, True])
def test_drafts_where_keys_take_all_the_time(learn: bool) -> None:
    """As a fit may say of long texts of a small model: one more row costs what all of its keys do."""
    model = CostModel((0.0, 0.0, 0.0, 0.0, 1e-6, 0.0), learn)
    load = Load(1, 100_000)
    for _ in range(20):
        model.may_draft(load, 8)
        assert model.draft_rows(load, [0.9] * 8) == 0
        model.observe(load, 0.1)


@MACHINES
def test_prompt_rows_fill_the_time(costs: tuple[float, ...]) -> None:
    """As many pages as fit: one more would not."""
    model = CostModel(costs, learn=False)
    for decode, depth in ((0, 0), (4, 0), (4, 3000), (16, 500)):
        beside = Load(decode, decode * 300)
        for factor in (2, 3, 10):
            step_s = factor * (model.seconds(beside) + model.seconds(Load(prefill=16)))
            rows = model.prompt_rows(beside, step_s, depth)
            assert rows % 16 == 0 and rows >= 16

            def seconds(prefill: int, beside: Load = beside, depth: int = depth) -> float:
                return model.seconds(
                    Load(beside.decode, beside.decode_keys, prefill, prefill * depth + prefill * (prefill + 1) // 2)
                )

            assert seconds(rows) <= step_s or rows == 16
            assert seconds(rows + 16) > step_s
            assert model.prompt_rows(beside, step_s, depth, most=40) <= 40


@MACHINES
@pytest.mark.parametrize("outliers", [0.0, 0.3])
def test_steps_with_answers_and_prompts_are_seldom_late(costs: tuple[float, ...], outliers: float) -> None:
    """Though their time varies; and where some take many times longer, prompts still get most of the time."""
    model, truth, rng = learned(costs, 400, outliers), CostModel(costs, learn=False), random.Random(5)
    decode = Load(4, 1200)
    step_s = 4 * (truth.seconds(decode) + truth.seconds(Load(prefill=16)))
    rows = model.prompt_rows(decode, step_s)
    took = [truth.seconds(Load(4, 1200, rows, rows * rows // 2)) * rng.gauss(1, 0.05) for _ in range(400)]
    assert rows > truth.prompt_rows(decode, step_s) / 2
    assert outliers or sum(one > step_s for one in took) < 0.25 * len(took)


def test_prompt_rows_are_at_least_a_page_and_at_most_what_is_left() -> None:
    model = CostModel()
    assert model.prompt_rows(Load(60, 60_000), 0.01) == 16
    assert model.prompt_rows(Load(), 1e9, most=300) == 288
    assert model.prompt_rows(Load(), 1e9, most=5) == 5
    assert CostModel((1.0, 1.0, 1.0, 0.0, 0.0, 0.0)).prompt_rows(Load(), 5.0, most=64) == 64


def test_decode_rows_cost_what_they_cost() -> None:
    assert CostModel((0, 4e-3, 0, 1e-3, 0, 0)).decode_rows_for(100) == 25
    assert CostModel((0, 1e-3, 0, 4e-3, 0, 0)).decode_rows_for(100) == 100
    assert CostModel((0, 1.0, 0, 1e-3, 0, 0)).decode_rows_for(16) == 1
