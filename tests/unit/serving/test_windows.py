"""Layers with a window get the pages that windows need: a model like Gemma 3 serves more sequences in the same bytes."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

from mlcpipe.bundle.memory import many_sequences
from mlcpipe.bundle.states import Part, State, windows_of
from mlcpipe.runtime.serving import sequence
from mlcpipe.runtime.serving.limits import Limits
from mlcpipe.runtime.serving.page_pool import PageGroup
from tests.unit.serving.simulation import Simulation, until_running, words

CONTEXT, CHUNK, WINDOW, LAYERS = 1024, 32, 32, 26


def table(sliding: list[int], slots: int = 0) -> tuple[State, ...]:
    """Of Gemma 3's shape, where five of six layers slide; `slots` layers beside them keep what a sequence has."""
    part = Part(name="keys", dtype="float16", shape=(16, 64), token_axis=0)
    layers = [
        State(name=f"{i}", kind="pages", parts=(part,), window=WINDOW * (i in sliding), layers=(i,))
        for i in range(LAYERS)
    ]
    row = Part(name="inputs", dtype="float32", shape=(64,))
    rest = [State(name=f"s{i}", kind="slot", parts=(row,), dtype="float32", layers=(i,)) for i in range(slots)]
    return (*layers, *rest)


GEMMA = table([layer for layer in range(LAYERS) if (layer + 1) % 6])


def units(states: tuple[State, ...], tokens: int) -> Any:
    model = SimpleNamespace(prefill_chunk=CHUNK, max_batch=64)
    manifest: Any = SimpleNamespace(model=model, states=states)
    return many_sequences(manifest, CONTEXT, tokens)


def test_more_sequences_of_the_whole_context_in_the_same_bytes() -> None:
    """Two sequences' pages if every layer kept all pages; seven answer at once, and none is preempted."""
    budget = 2 * CONTEXT // 16 * sum(state.unit_bytes for state in GEMMA)
    sequences = 7
    pages = units(GEMMA, sequences * CONTEXT)
    assert pages.nbytes(GEMMA) <= budget
    groups = tuple(PageGroup(*each) for each in zip(pages.pages, windows_of(GEMMA)))
    simulation = Simulation(groups, Limits(CONTEXT, CHUNK, sequences=sequences))
    rng = random.Random(0)
    several = [simulation.submit(words(rng, 700), CONTEXT - 700) for _ in range(sequences)]
    until_running(simulation, *several)
    assert all(one.state is sequence.State.RUNNING for one in several)
    simulation.run()
    assert not simulation.scheduler.totals.preemptions
    again = simulation.submit([*several[0].tokens[:-30], 1], 1)
    simulation.run()
    assert again.cached is not None and again.cached > CONTEXT - 100, "the window of the last answers is kept"


def test_models_of_one_kind_of_layer_have_one_group() -> None:
    for sliding in ([], list(range(LAYERS))):
        assert units(table(sliding), 3 * CONTEXT).pages == (3 * CONTEXT // 16,)
    assert windows_of(GEMMA) == (0, WINDOW)
    full, window = units(GEMMA, 3 * CONTEXT).pages
    assert window < full == 192
    assert units(GEMMA, 32).pages == (2, 2), "never more than the full layers have"


def test_slots_are_for_all_sequences_and_some_checkpoints() -> None:
    """Two of each sequence of a whole context at least, or a quarter of what the pages take, and three for drafts."""
    for states, tokens in ((table([], 2), 3 * CONTEXT), (table([], 2), 32 * CONTEXT), (table([], 4000), 3 * CONTEXT)):
        found, each = units(states, tokens), sum(state.unit_bytes for state in states if state.kind == "slot")
        pages = found.nbytes(states) - found.slots * each
        least, share = 2 * tokens // CONTEXT + 2, pages // 4 // each
        assert found.slots == min(192, max(least, share) + 3)
