"""Prompts of models with states in slots are cut where messages end, so that the next ones start there."""

from __future__ import annotations

import random

import pytest

from mlcpipe.runtime.serving.limits import Limits
from mlcpipe.runtime.serving.message_borders import border_between, page_borders
from mlcpipe.runtime.serving.page_pool import PageGroup
from mlcpipe.runtime.serving.sequence import Sequence
from tests.unit.serving.simulation import Simulation, alone, words

RNG = random.Random(4)
SYSTEM, USER, OTHER = (words(RNG, count) for count in (300, 90, 90))
HEADER, START, END = words(RNG, 3), 1000, 1001  # of an answer; control tokens


@pytest.mark.parametrize(
    ("length", "control", "expected"),
    [
        (400, [], ()),
        (400, [0], ()),
        (400, [0, 200, 202, 390, 392], (192, 384)),
        (400, [0, 200, 202, 397, 398, 399], (192, 384)),  # the answer begins with several
        (400, [0, 63, 64, 200, 202], (64, 192)),  # none of less tokens than a slot is worth
        (400, [0, 200, 202, 340, 344, 348, 399], (192, 336, 384)),  # of which the last three begin no answer
        (400, [0, 200, 400, 500], (192,)),
    ],
)
def test_they_are_ends_of_pages_before_control_tokens(
    length: int, control: list[int], expected: tuple[int, ...]
) -> None:
    assert page_borders(length, control) == expected


@pytest.mark.parametrize(
    ("begin", "end", "least", "expected"),
    [
        (0, 512, 0.5, 128),  # the first one, however short
        (128, 640, 0.5, 512),
        (128, 512, 0.6, None),  # 320 - 128 is a half
        (128, 512, 0.0, 320),
        (300, 512, 0.0, None),  # too close
        (512, 600, 0.0, None),
    ],
)
def test_a_forward_ends_at_the_first_or_the_last_one(begin: int, end: int, least: float, expected: int | None) -> None:
    assert border_between((128, 320, 512), begin, end, least) == expected


def chat(simulation: Simulation, *messages: list[int], answer: int = 20) -> Sequence:
    """A conversation to its end: each message between two control tokens, then the header of an answer."""
    tokens = [token for message in messages for token in (START, *message, END)] + [START, *HEADER]
    control = [place for place, token in enumerate(tokens) if token >= START]
    sequence = simulation.submit(tokens, answer, borders=page_borders(len(tokens), control))
    simulation.run()
    return sequence


@pytest.mark.parametrize("groups", [(PageGroup(200),), (PageGroup(200), PageGroup(200, 40))], ids=["full", "windows"])
@pytest.mark.parametrize("chunk", [64, 512])
def test_a_system_prompt_and_the_last_message_are_found(groups: tuple[PageGroup, ...], chunk: int) -> None:
    simulation = Simulation(groups, Limits(2048, prefill_chunk=chunk), slots=12)
    first, other = chat(simulation, SYSTEM, USER), chat(simulation, SYSTEM, OTHER)
    thoughtless = words(RNG, 70)  # the answer as the next turn has it, of which nothing was computed
    turn = chat(simulation, SYSTEM, OTHER, thoughtless, USER)
    again = chat(simulation, SYSTEM, USER)
    system, said = 302 // 16 * 16, 393 // 16 * 16
    assert [one.cached for one in (first, turn, again)] == [0, said, said]
    assert other.cached is not None and system - 64 < other.cached <= system
    assert chunk < len(SYSTEM) or other.cached == system
    for one in (first, other, turn, again):
        assert one.tokens == alone(one.request, groups, slots=12)


def test_models_without_slots_compute_prompts_as_before() -> None:
    rows = []
    for borders in ((), (64, 160, 288)):
        simulation = Simulation(limits=Limits(2048, prefill_chunk=128))
        simulation.submit(SYSTEM, 4, borders=borders)
        simulation.run()
        rows.append([(one.begin, one.rows) for step in simulation.steps for one in step.prefill])
    assert rows[0] == rows[1]
