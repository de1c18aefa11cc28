"""Pages of preempted sequences, on the host: which are copied, what comes back, and that no answer changes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mlcpipe.errors import ResourceError
from mlcpipe.runtime.serving.cost_model import CostModel
from mlcpipe.runtime.serving.limits import Limits
from mlcpipe.runtime.serving.page_pool import PageGroup
from mlcpipe.runtime.serving.swap import Swap
from tests.unit.serving.simulation import COSTS, Simulation, alone, until_running, words
from tir_schedules.step_layout import PAGE

BYTES = PAGE * 8  # of a simulated page, a digest for each token
KEPT = 1 << 20


class Copier:
    """Copies digests, at `rate` bytes a second of its own clock; every `fails`-th copy fails half way."""

    def __init__(self, simulation: Simulation, rate: float, fails: int = 0) -> None:
        self.places, self.rate, self.fails = simulation.memory.places[0], rate, fails
        self.now, self.count = 0.0, 0

    def copy_out(self, ids: Sequence[int]) -> NDArray[np.int8]:
        self._spend(ids)
        rows = [[place or 0 for place in self.places[page * PAGE : (page + 1) * PAGE]] for page in ids]
        return np.array(rows, np.uint64).view(np.int8).reshape(len(ids), 1, BYTES)

    def copy_in(self, ids: Sequence[int], pages: NDArray[np.int8]) -> None:
        for page, row in zip(ids, pages.reshape(len(ids), BYTES).view(np.uint64).tolist(), strict=True):
            self.places[page * PAGE : (page + 1) * PAGE] = row
        self._spend(ids)
        if self.fails and self.count % self.fails == 0:
            self.places[ids[0] * PAGE] = 1

    def _spend(self, ids: Sequence[int]) -> None:
        self.now += len(ids) * BYTES / self.rate
        self.count += 1
        if self.fails and self.count % self.fails == 0:
            raise ResourceError("the copy failed")


def swapping(simulation: Simulation, room: int = KEPT, rate: float = 1e9, fails: int = 0) -> Swap:
    copier = Copier(simulation, rate)
    admission = simulation.scheduler.admission
    admission.swap = Swap(copier, simulation.tree, simulation.cost, room, clock=lambda: copier.now)
    copier.fails = fails
    return admission.swap


def test_a_page_is_copied_where_that_takes_less_than_its_rows() -> None:
    """A row of a prompt takes 1 ms and 0.2 us for each key, one of an answer 2 ms and 1 us; a step's base counts not."""
    prompt_s = 16 * 1e-3 + 16 * 8 * 0.2e-6
    for seconds, decode_mask, place in ((prompt_s, 0, 0), (16 * (2e-3 + 1e-6 * (160 + 8)), 0xFFFF, 10)):
        for factor, cheaper in ((0.99, False), (1.01, True)):
            swap = swapping(Simulation(), rate=factor * 2 * BYTES / seconds)
            assert swap.page_bytes == BYTES and swap.is_cheaper(decode_mask, place) is cheaper
    free = Swap(Copier(Simulation(), 1e9), Simulation().tree, CostModel((1.0,) + (0.0,) * 5), KEPT)
    assert not free.is_cheaper(0, 0)


def test_what_was_taken_comes_back_without_being_computed() -> None:
    """A prompt of a higher class takes all pages of a lower one."""
    groups = (PageGroup(22),)
    computed = []
    for rate in (1e9, 1.0):
        simulation = Simulation(groups, Limits(400, sequences=4))
        swap = swapping(simulation, rate=rate)
        low = simulation.submit(words(random.Random(3), 100), 60, priority=-1)
        until_running(simulation, low)
        while len(low.tokens) < 140:
            simulation.step()
        high = simulation.submit(words(random.Random(4), 350), 2, priority=1)
        until_running(simulation, high)
        assert swap.bytes == (8 * BYTES if rate > 1 else 0)
        simulation.run()
        computed.append(sum(rows.rows for step in simulation.steps for rows in step.prefill if rows.sequence is low))
        assert low.preemptions == 1 and low.tokens == alone(low.request, groups)
        assert (swap.tokens_out, swap.tokens_in) == ((128, 128) if rate > 1 else (0, 0))
        assert swap.bytes == 0
    assert computed == [100, 200]


@pytest.mark.parametrize(
    ("room", "fails"), [(KEPT, 0), (3 * BYTES, 0), (BYTES - 1, 0), (KEPT, 2), (KEPT, 3), (5 * BYTES, 5)]
)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.everything) for seed in range(1, 4))])
def test_no_answer_changes(room: int, fails: int, seed: int) -> None:
    """Mixed lengths and classes, shared beginnings, cancels; with little room, and copies that fail."""
    rng, groups = random.Random(seed), (PageGroup(26),)
    simulation = Simulation(groups, Limits(400, sequences=8, prefill_chunk=64))
    swap, shared = swapping(simulation, room, fails=fails), words(rng, 100)
    asked: list[Any] = []
    while len(asked) < 40 or simulation.scheduler.has_work:
        if len(asked) < 40 and rng.random() < 0.3:
            prompt = shared[: rng.choice([0, 32, 70])] + words(rng, rng.randint(1, 90))
            priority, count = rng.choice([-1, 0, 1]), rng.randint(1, 120)
            asked.append(simulation.submit(prompt, count, priority=priority, deterministic=True))
        if asked and rng.random() < 0.01 and (one := rng.choice(asked)) not in simulation.ends:
            simulation.cancel(one)
            asked.remove(one)
        simulation.step()
        kept = [waiting.pages for waiting in swap._waiting.values()]
        assert swap.bytes == BYTES * sum(map(len, kept)) <= room
    for one in asked:
        assert one.tokens == alone(one.request, groups)
    assert simulation.scheduler.totals.preemptions > 5 and swap.bytes == 0 and not swap._wanted
    assert bool(swap.tokens_in) == (room >= BYTES)
    assert simulation.pool.counts()[0].used == 0


def test_copies_do_not_count_as_computing() -> None:
    """What the cost model learns of a step is without them."""
    simulation = Simulation((PageGroup(24),), Limits(400), CostModel(COSTS, learn=False))
    swap, observed = swapping(simulation), []
    simulation.cost.observe = lambda load, seconds: observed.append(seconds)  # type: ignore[method-assign]
    simulation.submit(words(random.Random(1), 20), 3)
    swap.seconds = 5e-3
    times = [simulation.now for _ in range(3) if simulation.step()]
    assert observed == pytest.approx([times[0] - 5e-3, times[1] - times[0], times[2] - times[1]])
