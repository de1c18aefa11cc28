"""What planning costs in Python, beside a plain loop."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest

from mlcpipe.runtime.serving.limits import Limits
from mlcpipe.runtime.serving.page_pool import PageGroup
from tests.unit.serving.simulation import Simulation, words


def loop() -> int:
    """A thousand additions: 20 us."""
    total = 0
    for i in range(1000):
        total += i
    return total


def ratio(step: Callable[[], object]) -> float:
    """Of the fastest steps to the fastest loops, taken in turns."""
    times = []
    for _ in range(300):
        began = time.perf_counter()
        step()
        between = time.perf_counter()
        loop()
        times.append((between - began, time.perf_counter() - between))
    fastest = [min(one) for one in zip(*times)]
    return fastest[0] / fastest[1]


@pytest.mark.alone
@pytest.mark.parametrize("queued", [0, 200])
def test_planning_and_settling_32_sequences_costs_little(queued: int) -> None:
    """Also where a queue waits behind them."""
    rng = random.Random(0)
    limits = Limits(4096, sequences=32, step_s=10.0)
    simulation = Simulation((PageGroup(2400),), limits, checked=False)
    for _ in range(32):
        simulation.submit(words(rng, 100), 1500)
    while simulation.scheduler.admission.prefilling or len(simulation.scheduler.admission.waiting):
        simulation.step()
    for _ in range(queued):
        simulation.submit(words(rng, 3000), 900)

    def step() -> None:
        planned = simulation.scheduler.plan(simulation.now)
        assert planned is not None and len(planned.decode) == 32
        simulation.now += 0.05
        simulation.scheduler.settle(planned, [1] * planned.draws, simulation.now)

    assert ratio(step) < 7  # 3.6 to 4
