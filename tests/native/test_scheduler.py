"""The native runtime's scheduler makes the plans of Python's: those of recorded traces, and of random ones."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlcpipe.runtime.sampling_params import CacheMiss
from mlcpipe.runtime.serving.cost_model import DEFAULT_COSTS, CostModel, Load
from mlcpipe.runtime.serving.drafting import Lookup, Search
from mlcpipe.runtime.serving.limits import Limits
from mlcpipe.runtime.serving.message_borders import page_borders
from mlcpipe.runtime.serving.page_pool import PageGroup
from mlcpipe.runtime.serving.sequence import Finish, Sequence
from tests.native.cxx import RUNTIME, Cxx
from tests.unit.serving.golden import GOLDEN, TRACES, Recording
from tests.unit.serving.simulation import words

SOURCES = [
    Path(__file__).with_name("scheduler_trace.cc"),
    *sorted(path for path in (RUNTIME / "serving").glob("*.cc") if path.stem not in ("batch", "draft_head")),
    RUNTIME / "units.cc",
]


@pytest.fixture(scope="module")
def program(cxx: Cxx) -> Path:
    return cxx.program(SOURCES)


def _listed(numbers: Iterable[object]) -> list[object]:
    numbers = list(numbers)
    return [len(numbers), *numbers]


def control_places(tokens: list[int]) -> list[int]:
    """Where a message begins or ends: as often as in short chats."""
    return [place for place, token in enumerate(tokens) if token % 16 == 0]


def replayed(program: Path, trace: dict[str, Any]) -> list[dict[str, Any]]:
    """What the program makes of a trace's requests and drawn tokens, by turn; last what each request says of its cache and drafts."""
    limits, groups = trace["limits"], trace["groups"]
    above = -1 if limits["recompute_above"] is None else limits["recompute_above"]
    words: list[object] = [len(groups), *(group[name] for group in groups for name in ("pages", "window"))]
    words.append(trace.get("slots", 0))
    words += [limits[name] for name in ("context", "prefill_chunk", "sequences", "queue", "decode_rows", "step_s")]
    words += [above, *trace["costs"]]
    for turn in trace["turns"]:
        words += [turn["now"], len(turn["submit"])]
        for one in turn["submit"]:
            deadline = -1 if one.get("deadline_s") is None else one["deadline_s"]
            words += [*_listed(one["tokens"]), one["max_tokens"], *_listed(one["stop_ids"]), one.get("priority", 0)]
            words += [deadline, f"salt-{one.get('namespace', '')}"]
            words += [int(one.get(name) not in (None, False)) for name in ("keep", "deterministic", "drafter")]
            words += _listed(control_places(one["tokens"]) if "borders" in one else ())
        words.append(len(turn["cancel"]))
        for number in turn["cancel"]:
            words += [
                number,
                list(Finish).index(Finish.ERROR if number in trace.get("failed", ()) else Finish.CANCELLED),
            ]
        words += [*_listed(turn.get("drawn", [])), turn.get("settled", 0.0)]
    text = " ".join(map(str, words))
    done = subprocess.run([program], input=text, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def assert_same_plans(program: Path, trace: dict[str, Any]) -> None:
    *found, requests = replayed(program, trace)
    assert len(found) == len(trace["turns"])
    misses, drafted = [one[:2] for one in requests], [sum(one[at] for one in requests) for at in (2, 3)]
    assert (misses, drafted) == (trace.get("misses", misses), trace.get("drafted", drafted))
    for number, (expected, one) in enumerate(zip(trace["turns"], found)):
        assert one["cancelled"] == 1, number
        for name in ("expired", "plan", "events"):
            assert one.get(name) == expected.get(name), (number, name)
    assert found[-1]["has_work"] == 0


@pytest.mark.parametrize("name", TRACES)
def test_the_plans_are_those_of_the_file(name: str, program: Path) -> None:
    assert_same_plans(program, json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8")))


class Failing(Recording):
    """A recording in which some sequences end because their numbers are wrong."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.failed: set[int] = set()
        self.everybody: list[Sequence] = []

    def submit(self, tokens: Any, max_tokens: int = 8, **rest: Any) -> Sequence:
        """As `Recording.submit`."""
        self.everybody.append(super().submit(tokens, max_tokens, **rest))
        return self.everybody[-1]

    def fail(self, sequence: Sequence) -> None:
        """End it with an error."""
        event = self.scheduler.cancel(sequence, Finish.ERROR)
        if event is not None:
            self.failed.add(sequence.id)
            self._turn["cancel"].append(sequence.id)
            self.deliver([event])

    def run(self, most: int = 10_000) -> None:
        """Until nobody has anything to do: a step that preempts whom it had planned for may be empty."""
        for _ in range(most):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError("it does not end")

    def trace(self) -> dict[str, Any]:
        misses = [one.miss or CacheMiss("") for one in self.everybody]
        listed = [[one.reason, -1 if one.token is None else one.token] for one in misses]
        drafted = [self.scheduler.totals.drafted, self.scheduler.totals.accepted]
        return {**super().trace(), "failed": self.failed, "misses": listed, "drafted": drafted}


def drafting_trace(seed: int) -> Failing:
    """Few different tokens, so that lookups find many matches of which some are right; with slots and without, few pages."""
    rng = random.Random(seed)
    slots = (0, 12, 40)[seed % 3]
    limits = Limits(200, prefill_chunk=48, sequences=3, decode_rows=rng.choice((6, 16)), step_s=0.1)
    simulation = Failing(
        (PageGroup(rng.choice((16, 40)), rng.choice((0, 0, 40))),), limits, slots=slots, redraws=False, vocab=3
    )
    for _ in range(4):
        for _ in range(rng.randint(1, 2)):
            drafter = Lookup(stops=frozenset()) if rng.random() < 0.8 else None
            simulation.submit(words(rng, rng.randint(1, 60), 3), rng.randint(5, 40), drafter=drafter)
        for _ in range(rng.randint(1, 6)):
            simulation.step()
    simulation.run()
    return simulation


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.everything) for seed in range(2, 6))])
def test_drafts_are_python_s(seed: int, program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Search, "pays", lambda self: True)  # which depends on the time that looking takes
    made = drafting_trace(seed)
    assert_same_plans(program, made.trace())
    totals = made.scheduler.totals
    assert made.scheduler._search._looks < 64 and 0 < totals.accepted < totals.drafted


def random_trace(seed: int) -> Failing:
    """Up to eight sequences over few pages and slots: all that requests may say, prompts that begin alike, cancels."""
    rng = random.Random(seed)
    context = rng.choice((96, 160, 300))
    pages = -(-context // 16) + rng.choice((2, 8, 40))
    windows = rng.choice(((0,), (40,), (0, 33), (0, 64, 33), (64, 33)))
    groups, slots = [PageGroup(pages, window) for window in windows], rng.choice((0, 0, 4, 9, 30))
    above = rng.choice((None, None, 70))
    limits = Limits(
        context, prefill_chunk=rng.choice((16, 48, 64)), sequences=rng.randint(1, 8), decode_rows=rng.choice((8, 64)),
        step_s=rng.choice((0.03, 0.06, 0.1)),
    )  # fmt: skip
    simulation = Failing(tuple(groups), limits, recompute_above=above, slots=slots, redraws=False)
    shared = [words(rng, 80) for _ in range(2)]
    everybody: list[Any] = []
    for turn in range(40):
        for _ in range(rng.choice((0, 1, 1, 3))):
            prompt = rng.choice(shared)[: rng.randint(1, 80)] + words(rng, rng.randint(0, 15))
            if everybody and rng.random() < 0.3:  # the next turn of a conversation, or the same prompt again
                prompt = list(rng.choice(everybody).tokens)[: rng.randint(1, context - 20)]
            rest: dict[str, Any] = {"priority": rng.choice((-1, 0, 0, 1)), "deterministic": rng.random() < 0.3}
            rest |= {"keep": turn < 10 and rng.random() < 0.1, "namespace": rng.choice(("", "", "other"))}
            rest["deadline_s"] = round(simulation.now + rng.uniform(0.1, 2.0), 3) if rng.random() < 0.2 else None
            rest["stop_ids"], prompt = frozenset(words(rng, 20)), prompt[: context - 1]
            if slots:
                rest["borders"] = page_borders(len(prompt), control_places(prompt))
            everybody.append(simulation.submit(prompt, rng.randint(1, 60), **rest))
        if everybody and rng.random() < 0.2:
            rng.choice((simulation.cancel, simulation.fail))(rng.choice(everybody))
        for _ in range(rng.randint(0, 4)):
            simulation.step()
    simulation.run()
    return simulation


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.everything) for seed in range(2, 4))])
def test_random_traces_have_python_s_plans(seed: int, program: Path) -> None:
    for number in range(seed * 3, seed * 3 + 3):
        assert_same_plans(program, random_trace(number).trace())


@pytest.mark.everything  # a minute of traces
def test_many_random_traces_have_python_s_plans(program: Path) -> None:
    for number in range(100, 300):
        assert_same_plans(program, random_trace(number).trace())


def test_the_cost_model_learns_what_python_s_does(program: Path) -> None:
    rng = np.random.default_rng(5)
    truth, python = CostModel((30e-3, 4e-3, 25e-3, 2e-3, 1e-6, 0.3e-6), learn=False), CostModel()
    loads, expected, drafted = [], [], []
    for _ in range(300):
        decode, prefill = (int(rng.integers(0, 9)), int(rng.integers(0, 3)) * int(rng.integers(16, 400)))
        load = Load(decode, decode * int(rng.integers(1, 900)), prefill, prefill * int(rng.integers(8, 500)))
        seconds = truth.seconds(load) * float(rng.lognormal(0, 0.1)) * (4 if rng.random() < 0.05 else 1)
        loads += [load.decode, load.decode_keys, load.prefill, load.prefill_keys, seconds]
        python.observe(load, seconds)
        beside, answers = Load(load.decode, load.decode_keys), Load(load.decode + 1, load.decode_keys)
        expected.append([python.seconds(load), python.prompt_rows(beside, 0.4, 100, 512), python.decode_rows_for(200)])
        drafted.append(
            [python.may_draft(answers, 8), python.draft_rows(answers, (0.9, 0.8, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3))]
        )
    done = subprocess.run(
        [program, "learn"], input=" ".join(map(str, loads)), capture_output=True, text=True, check=True
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    found, choices = np.array(lines[::2]), lines[1::2]
    same = sum(one == [int(may), rows] for one, (may, rows) in zip(choices, drafted))
    assert (
        same >= 0.98 * len(choices) and len({rows for _, rows in drafted}) > 3
    )  # a tie may fall otherwise in its last bit
    np.testing.assert_allclose(found[:, 0], np.array(expected)[:, 0], rtol=1e-6)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1)  # of whole rows the last bit of a cost may make one
    assert python.costs != DEFAULT_COSTS and len({rows for _, rows, _ in expected}) > 3
