"""Traces of requests and the plans for them, for every runtime that schedules: all have to make the same plans.

`python -m tests.unit.serving.golden` writes `golden/*.json` again. Each has the limits, the pages, the costs of the cost
model (which does not learn), and turns; `slots` are those of states, if there are any. In a turn requests come (`submit`), then some go (`cancel`), both at time `now`;
deadlines pass (`expired`); a step is planned or none (null), with the page tables of each of its sequences, decode
before prefill; the device draws tokens (`drawn`) until `settled`, and the sequences get them (`events`). Sequences are numbered in
the order of submission. Page ids are part of the plan: free pages are taken from the end of a list to which they return.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mlcpipe.runtime.serving.limits import Limits
from mlcpipe.runtime.serving.page_pool import PageGroup
from mlcpipe.runtime.serving.sequence import Sequence
from mlcpipe.runtime.serving.step import Event, Step
from tests.unit.serving.simulation import COSTS, Simulation, words

GOLDEN = Path(__file__).with_name("golden")


def events_json(events: list[Event]) -> list[Any]:
    """[sequence, tokens, why it ended or null] of each."""
    return [[one.sequence.id, one.tokens, one.finish.value if one.finish else None] for one in events]


def step_json(step: Step | None, slots: bool) -> Any:
    """Rows, copies and tables; [sequence, tokens, rows with logits], [sequence, begin, rows, [who draws]]."""
    if step is None:
        return None
    sequences: list[Sequence] = [rows.sequence for rows in (*step.decode, *step.prefill)]
    return {
        "decode": [[rows.sequence.id, rows.tokens, rows.logits] for rows in step.decode],
        "prefill": [
            [rows.sequence.id, rows.begin, rows.rows, [one.id for one in rows.drawing]] for rows in step.prefill
        ],
        "copies": [list(copy) for copy in step.copies],
        "tables": [[list(table) for table in sequence.tables] for sequence in sequences],
    } | ({"slots": [[sequence.slot, sequence.next_slot] for sequence in sequences]} if slots else {})


class Recording(Simulation):
    """A simulation that writes down its turns."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.turns: list[dict[str, Any]] = []
        self._turn: dict[str, Any] = {"submit": [], "cancel": []}

    def submit(self, tokens: Any, max_tokens: int = 8, **rest: Any) -> Sequence:
        """A request that arrives now."""
        sequence = super().submit(tokens, max_tokens, **rest)
        stop_ids = sorted(rest.pop("stop_ids", ()))
        self._turn["submit"].append({"tokens": list(tokens), "max_tokens": max_tokens, "stop_ids": stop_ids, **rest})
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        """End it."""
        if sequence not in self.ends:
            self._turn["cancel"].append(sequence.id)
        super().cancel(sequence)

    def step(self) -> Step | None:
        """One turn."""
        turn, self._turn = self._turn, {"submit": [], "cancel": []}
        self.now = round(self.now, 6)
        turn["now"] = self.now
        expired = self.scheduler.expire(self.now)
        self.deliver(expired)
        step = self.scheduler.plan(self.now)
        turn |= {"expired": events_json(expired), "plan": step_json(step, self.slots > 0)}
        self.turns.append(turn)
        if step is None:
            return None
        turn["drawn"] = self.compute(step)
        self.now = turn["settled"] = round(self.now + self.cost.seconds(step.load), 6)
        events = self.scheduler.settle(step, turn["drawn"], self.now)
        turn["events"] = events_json(events)
        self.deliver(events)
        self.check()
        return step

    def trace(self) -> dict[str, Any]:
        """What goes to the file."""
        groups = [asdict(group) for group in self.groups]
        slots = {"slots": self.slots} if self.slots else {}
        return {"groups": groups, **slots, "limits": asdict(self.limits), "costs": COSTS, "turns": self.turns}


def classes() -> Recording:
    """Classes, aging, places, a long prompt that lets short ones pass, a target in time."""
    rng = random.Random(1)
    simulation = Recording((PageGroup(128),), Limits(1024, prefill_chunk=128, sequences=3, step_s=0.08))
    simulation.submit(words(rng, 30), 60)
    simulation.step()
    simulation.submit(words(rng, 600), 4, priority=-1)
    for turn in range(24):
        simulation.submit(words(rng, rng.randint(5, 90)), rng.randint(1, 12), priority=rng.choice((-1, 0, 0, 1)))
        for _ in range(1 + turn % 3):
            simulation.step()
    simulation.run()
    return simulation


def few_pages() -> Recording:
    """Answers outgrow the pages: eviction, preemption, protection, answers recomputed as decode rows."""
    rng = random.Random(2)
    simulation = Recording((PageGroup(14),), Limits(160, prefill_chunk=64, sequences=6, decode_rows=12, step_s=0.1))
    for _ in range(9):
        simulation.submit(words(rng, rng.randint(10, 60)), rng.randint(30, 90), priority=rng.choice((0, 0, 1)))
        for _ in range(3):
            simulation.step()
    simulation.run()
    return simulation


def windows() -> Recording:
    """Two groups, one with a window whose pages come back; prompts that begin alike, who minds the arithmetic."""
    rng = random.Random(3)
    simulation = Recording((PageGroup(60), PageGroup(26, 40)), Limits(400, prefill_chunk=64, sequences=4))
    shared = [words(rng, 90) for _ in range(2)]
    last: list[Sequence] = []
    for turn in range(14):
        prompt = rng.choice(shared)[: rng.randint(20, 90)] + words(rng, rng.randint(1, 40))
        if last and turn % 3 == 0:  # the next turn of a conversation
            prompt = [*rng.choice(last).tokens, *words(rng, 5)]
        last.append(simulation.submit(prompt, rng.randint(5, 40), deterministic=turn % 2 == 0))
        for _ in range(rng.randint(0, 12)):
            simulation.step()
    simulation.run()
    return simulation


def comings_and_goings() -> Recording:
    """In-batch sharing, namespaces, cancels, deadlines, kept prompts, stop ids, frequencies that change at a length."""
    rng = random.Random(4)
    limits = Limits(300, prefill_chunk=64, sequences=4, recompute_above=120)
    simulation = Recording((PageGroup(48),), limits, recompute_above=120)
    system = words(rng, 70)
    simulation.submit(system, 1, keep=True)
    everybody: list[Sequence] = []
    for turn in range(22):
        prompt = [*system, *words(rng, rng.randint(1, 60))] if turn % 4 else words(rng, 100)
        rest: dict[str, Any] = {"namespace": rng.choice(("", "", "adapter"))}
        if turn % 5 == 2:
            rest["deadline_s"] = round(simulation.now + rng.uniform(0.1, 1.0), 3)
        if turn % 5 == 3:
            rest["stop_ids"] = frozenset(words(rng, 60))
        everybody.append(simulation.submit(prompt, rng.randint(1, 30), **rest))
        if turn % 3 == 1:
            simulation.cancel(rng.choice(everybody))
        for _ in range(rng.randint(0, 8)):
            simulation.step()
    simulation.run()
    return simulation


def same_prompts() -> Recording:
    """Several answers to one prompt: it is computed once, and its last page copied for each but one."""
    rng = random.Random(5)
    simulation = Recording((PageGroup(40), PageGroup(30, 40)), Limits(200, prefill_chunk=48, sequences=6))
    for turn in range(5):
        prompt = words(rng, rng.randint(20, 80))
        several = [simulation.submit(prompt, rng.randint(1, 30)) for _ in range(1 + 2 * turn)]
        simulation.step()
        simulation.cancel(rng.choice(several))
        for _ in range(rng.randint(0, 8)):
            simulation.step()
    simulation.run()
    return simulation


def slots() -> Recording:
    """States in slots: checkpoints of prompts and answers, forks, few slots, answers that outgrow the pages."""
    rng = random.Random(6)
    limits = Limits(400, prefill_chunk=64, sequences=4)
    simulation = Recording((PageGroup(36), PageGroup(30, 40)), limits, slots=9, redraws=False)
    shared = [words(rng, 150) for _ in range(2)]
    last: list[Sequence] = []
    for turn in range(7):
        prompt = rng.choice(shared)[: rng.randint(20, 150)] + words(rng, rng.randint(1, 90))
        if last and turn % 3 == 0:  # the next turn of a conversation
            prompt = [*rng.choice(last).tokens[:300], *words(rng, 5)]
        for _ in range(1 + 2 * (turn % 4 == 1)):
            last.append(simulation.submit(prompt, rng.randint(5, 90), priority=rng.choice((0, 0, 1))))
        if turn % 5 == 4:
            simulation.cancel(rng.choice(last))
        for _ in range(rng.randint(0, 12)):
            simulation.step()
    simulation.run()
    assert simulation.scheduler.totals.preemptions and simulation.scheduler.totals.prefix_hits
    return simulation


TRACES: dict[str, Callable[[], Recording]] = {
    make.__name__: make for make in (classes, few_pages, windows, comings_and_goings, same_prompts, slots)
}


def main() -> None:
    """Write the files: one line a turn."""
    GOLDEN.mkdir(exist_ok=True)
    for name, make in TRACES.items():
        trace = make().trace()
        head, turns = {**trace, "turns": None}, ",\n".join(json.dumps(turn) for turn in trace["turns"])
        text = json.dumps(head).replace('"turns": null', f'"turns": [\n{turns}\n]')
        (GOLDEN / f"{name}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
