"""The test that a record must pass, on timings that are made up."""

from __future__ import annotations

import numpy as np
import pytest

from mlcpipe.tuning.noise import MIN_PAIRS, judge


def pairs(gain: float, noise: float, count: int, seed: int, drift: float = 0.0) -> list[tuple[float, float]]:
    """Seconds of a default and of a candidate that is `gain` times as fast, on a machine that slows down by `drift`."""
    draw = np.random.default_rng(seed)
    slow = np.linspace(1, 1 + drift, 2 * count) * np.exp(draw.normal(0, noise, 2 * count))
    return [(float(1e-3 * slow[2 * i]), float(1e-3 / gain * slow[2 * i + 1])) for i in range(count)]


def test_medians_and_the_lower_quartile() -> None:
    verdict = judge([(2.0, 1.0), (3.0, 2.0), (4.0, 1.0), (1.0, 1.0), (5.0, 2.0)])
    assert (verdict.default_s, verdict.candidate_s, verdict.ratio, verdict.quartile) == (3.0, 1.0, 2.0, 1.5)


def test_equal_kernels_do_not_win() -> None:
    wins = [judge(pairs(1.0, noise, 24, seed)).wins for noise in (0.001, 0.05, 0.3) for seed in range(300)]
    assert sum(wins) <= 1


def test_a_gain_beyond_the_noise_wins() -> None:
    assert all(judge(pairs(1.10, 0.03, 24, seed)).wins for seed in range(300))


def test_a_gain_within_the_noise_does_not() -> None:
    assert sum(judge(pairs(1.05, 0.3, 24, seed)).wins for seed in range(300)) <= 3


def test_a_machine_that_slows_down_slows_both() -> None:
    assert all(judge(pairs(1.10, 0.02, 24, seed, drift=3.0)).wins for seed in range(100))
    assert not any(judge(pairs(1.0, 0.005, 24, seed, drift=3.0)).wins for seed in range(100))


@pytest.mark.parametrize("count", (2, MIN_PAIRS - 1))
def test_few_pairs_prove_nothing(count: int) -> None:
    assert not judge(pairs(2.0, 0.001, count, 0)).wins
