"""The reasons for which no more of a prompt was reused."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from mlcpipe.runtime.sampling_params import CacheMiss
from mlcpipe.runtime.serving.limits import Limits
from mlcpipe.runtime.serving.page_pool import PageGroup
from mlcpipe.runtime.serving.sequence import Sequence
from tests.unit.serving.simulation import Simulation, words

RNG = random.Random(9)
PROMPT, OTHER, MORE = (words(RNG, count) for count in (100, 100, 40))
SLOTS: dict[str, Any] = {"slots": 8}
ADAPTER = SimpleNamespace(serial=7, begin=0, end=1)

Before = Callable[[Simulation], Sequence]


def first(**rest: Any) -> Before:
    """The prompt, and an answer of 30 tokens."""
    return lambda simulation: simulation.submit(PROMPT, 30, **rest)


def evicted(*counts: int) -> Before:
    """The same, after which so many of its pages and slots are needed."""

    def run(simulation: Simulation) -> Sequence:
        sequence = first()(simulation)
        simulation.run()
        assert simulation.tree.evict(counts)
        return sequence

    return run


def ask(before: Before, tokens: Callable[[list[int]], list[int]], given: dict[str, Any], **rest: Any) -> Sequence:
    simulation = Simulation(limits=Limits(1024, prefill_chunk=256), **given)
    answer = before(simulation)
    simulation.run()
    sequence = simulation.submit(tokens(answer.tokens), 2, **rest)
    simulation.run()
    counted = {} if sequence.miss is None else {sequence.miss.reason: 1}
    before_it = {} if answer.miss is None else {answer.miss.reason: 1}
    assert simulation.scheduler.totals.misses == {
        reason: counted.get(reason, 0) + before_it.get(reason, 0) for reason in {*counted, *before_it}
    }
    return sequence


@pytest.mark.parametrize(
    ("before", "tokens", "given", "rest", "cached", "miss"),
    [
        pytest.param(first(), lambda known: [*known, *MORE], {}, {}, 128, None, id="next-turn"),
        pytest.param(first(), lambda known: PROMPT, {}, {}, 96, None, id="again"),
        pytest.param(first(), lambda known: PROMPT[:90], SLOTS, {}, 0, "no_checkpoint", id="shorter-in-slots"),
        pytest.param(first(), lambda known: [*known, *MORE], SLOTS, {}, 128, None, id="next-turn-in-slots"),
        pytest.param(first(), lambda known: [*PROMPT[:70], *MORE], {}, {}, 64, ("prompt_differs", 70), id="edited"),
        pytest.param(first(), lambda known: OTHER, {}, {}, 0, ("prompt_differs", 0), id="another"),
        pytest.param(first(), lambda known: PROMPT, {}, {"namespace": "x"}, 0, "first_prompt", id="another-salt"),
        pytest.param(first(adapter=ADAPTER), lambda known: PROMPT, {}, {}, 0, "adapter_differs", id="adapter"),
        pytest.param(evicted(5), lambda known: known, {}, {}, 48, "evicted", id="some-evicted"),
        pytest.param(evicted(8), lambda known: known, {}, {}, 0, "evicted", id="all-evicted"),
        pytest.param(evicted(0, 1), lambda known: PROMPT, SLOTS, {}, 0, "state_evicted", id="state-evicted"),
        pytest.param(
            first(), lambda known: known, {}, {"deterministic": True}, 96, "deterministic", id="deterministic"
        ),
        pytest.param(
            first(), lambda known: PROMPT, {"groups": (PageGroup(64), PageGroup(64, 20))}, {}, 96, None, id="window"
        ),
        pytest.param(
            evicted(0, 4), lambda known: PROMPT[:60], {"groups": (PageGroup(64), PageGroup(64, 20))}, {}, 0, "evicted",
            id="window-evicted",
        ),
        pytest.param(
            first(), lambda known: PROMPT[:20], {"recompute_above": 64}, {}, 0, "length_differs", id="length"
        ),
    ],
)  # fmt: skip
def test_reasons(
    before: Before, tokens: Callable[[list[int]], list[int]], given: dict[str, Any], rest: dict[str, Any], cached: int,
    miss: Any,
) -> None:  # fmt: skip
    sequence = ask(before, tokens, given, **rest)
    expected = None if miss is None else CacheMiss(*miss) if isinstance(miss, tuple) else CacheMiss(miss)
    assert (sequence.cached, sequence.miss) == (cached, expected)


def test_a_parked_answer_says_where_the_prompt_differs() -> None:
    simulation = Simulation()
    answer = simulation.submit(PROMPT, 30, parks=True)
    simulation.run()
    turns = [simulation.submit(tokens, 2) for tokens in ([*answer.tokens[:110], 5, *MORE],)]
    simulation.run()
    assert [(one.cached, one.miss) for one in turns] == [(110, CacheMiss("prompt_differs", 110))]
    assert answer.miss == CacheMiss("first_prompt")
