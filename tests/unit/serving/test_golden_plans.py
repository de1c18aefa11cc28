"""Plans of recorded traces, which every runtime has to make: replayed from the files alone."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from mlcpipe.runtime.serving.cost_model import CostModel
from mlcpipe.runtime.serving.limits import Limits
from mlcpipe.runtime.serving.page_pool import PageGroup, PagePool
from mlcpipe.runtime.serving.prefix_tree import PrefixTree
from mlcpipe.runtime.serving.scheduler import Scheduler
from mlcpipe.runtime.serving.sequence import ScheduledRequest
from tests.unit.serving.golden import GOLDEN, TRACES, events_json, step_json


def load(name: str) -> dict[str, Any]:
    trace: dict[str, Any] = json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))
    return trace


def request(fields: dict[str, Any], now: float) -> ScheduledRequest:
    changed = {"tokens": tuple(fields["tokens"]), "stop_ids": frozenset(fields["stop_ids"]), "arrival": now}
    return ScheduledRequest(**{**fields, **changed})


@pytest.mark.parametrize("name", TRACES)
def test_the_plans_are_those_of_the_file(name: str) -> None:
    trace = load(name)
    limits = Limits(**trace["limits"])
    pool = PagePool([PageGroup(**group) for group in trace["groups"]], trace.get("slots", 0))
    tree = PrefixTree(pool, limits.recompute_above)
    scheduler = Scheduler(pool, tree, CostModel(tuple(trace["costs"]), learn=False), limits)
    sequences = []
    for number, turn in enumerate(trace["turns"]):
        now = turn["now"]
        # Those who came and went in one turn went after they came.
        sequences += [scheduler.submit(request(fields, now)) for fields in turn["submit"]]
        for cancelled in turn["cancel"]:
            assert scheduler.cancel(sequences[cancelled]) is not None
        assert events_json(scheduler.expire(now)) == turn["expired"], number
        step = scheduler.plan(now)
        assert step_json(step, pool.slots is not None) == turn["plan"], number
        if step is not None:
            assert events_json(scheduler.settle(step, turn["drawn"], turn["settled"])) == turn["events"], number
    assert not scheduler.has_work


def test_the_traces_have_what_they_are_for() -> None:
    """Each rule of the scheduler shows in some file."""
    traces = {name: load(name) for name in TRACES}
    assert {path.stem for path in GOLDEN.glob("*.json")} == set(TRACES)
    ends = {event[2] for trace in traces.values() for turn in trace["turns"] for event in turn.get("events", [])}
    assert {"stop", "length"} <= ends
    turns = traces["comings_and_goings"]["turns"]
    assert any(turn["cancel"] for turn in turns) and any(turn["expired"] for turn in turns)
    decode = [rows for turn in traces["few_pages"]["turns"] for rows in (turn["plan"] or {"decode": []})["decode"]]
    assert any(len(tokens) > 1 for _, tokens, _ in decode) and any(not logits for _, _, logits in decode)
    tables = [table for turn in traces["windows"]["turns"] for table in (turn["plan"] or {"tables": []})["tables"]]
    assert any(-1 in window for _, window in tables) and not any(-1 in full for full, _ in tables)
    both = [
        turn
        for turn in traces["classes"]["turns"]
        if turn["plan"] and turn["plan"]["decode"] and turn["plan"]["prefill"]
    ]
    assert len(both) > 10
    begins = list(
        itertools.chain.from_iterable(turn["plan"]["prefill"] for turn in traces["windows"]["turns"] if turn["plan"])
    )
    assert any(begin for _, begin, _, _ in begins)
