"""Layers with a window get the pages that windows need: a model like Gemma 3 serves more sequences in the same bytes."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from mlcpipe.errors import UsageError
from mlcpipe.runtime.serving.executor import layer_pages, page_groups
from mlcpipe.runtime.serving.limits import Limits
from mlcpipe.runtime.serving.prefix_pages import check_savable
from mlcpipe.runtime.serving.sequence import State
from tests.unit.serving.simulation import Simulation, until_running, words

CONTEXT, CHUNK, WINDOW, LAYERS = 1024, 32, 32, 26


def bundle(sliding_layers: list[int]) -> Any:
    """What page groups are made of: a model of Gemma 3's shape, where five of six layers slide."""
    model = SimpleNamespace(
        page_size=16, num_layers=LAYERS, sliding_layers=sliding_layers, sliding_window=WINDOW, prefill_chunk=CHUNK
    )
    return SimpleNamespace(manifest=SimpleNamespace(model=model), context_length=CONTEXT)


GEMMA = bundle([layer for layer in range(LAYERS) if (layer + 1) % 6])


def test_more_sequences_of_the_whole_context_in_the_same_bytes() -> None:
    """Two sequences' pages if every layer kept all pages; seven answer at once, and nobody gives way."""
    budget = 2 * CONTEXT // GEMMA.manifest.model.page_size * GEMMA.manifest.model.num_layers
    sequences = 7
    assert sum(layer_pages(GEMMA, sequences * CONTEXT)) <= budget
    simulation = Simulation(page_groups(GEMMA, sequences * CONTEXT), Limits(CONTEXT, CHUNK, sequences=sequences))
    rng = random.Random(0)
    several = [simulation.submit(words(rng, 700), CONTEXT - 700) for _ in range(sequences)]
    until_running(simulation, *several)
    assert all(one.state is State.RUNNING for one in several)
    simulation.run()
    assert not simulation.scheduler.totals.preemptions
    again = simulation.submit([*several[0].tokens[:-30], 1], 1)
    simulation.run()
    assert again.cached is not None and again.cached > CONTEXT - 100, "the window of the last answers is kept"


def test_models_of_one_kind_of_layer_have_one_group() -> None:
    for sliding in ([], list(range(LAYERS))):
        assert [group.pages for group in page_groups(bundle(sliding), 3 * CONTEXT)] == [3 * CONTEXT // 16]
    (full, window), short = page_groups(GEMMA, 3 * CONTEXT), page_groups(GEMMA, 32)
    assert window.pages < full.pages == 192 and window.window == WINDOW and not full.window
    assert [group.pages for group in short] == [2, 2], "never more than the full layers have"


def test_prefixes_that_cannot_be_saved() -> None:
    core: Any = SimpleNamespace(
        scheduler=SimpleNamespace(pool=SimpleNamespace(groups=page_groups(bundle([1]), CONTEXT)))
    )
    with pytest.raises(UsageError, match="sliding window"):
        check_savable(core)
