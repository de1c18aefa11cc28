"""Tuning with a device that is made up: what is found, kept, resumed; what failures and the budget do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tvm import tirx

from mlcpipe.nn import definitions
from mlcpipe.quantization.layout import load_layout
from mlcpipe.quantization.scheme import load_scheme
from mlcpipe.tuning.journal import Journal
from mlcpipe.tuning.pool import WorkerError
from mlcpipe.tuning.run import State, TuneOptions, tune, verify
from mlcpipe.tuning.tasks import Task
from tir_schedules.space import Choice, Space

DEFAULT = {"rows": 6, "depth": 1024}
TRIALS = 19  # of 22 choices, four of which are the best: one of them is tried, whatever is drawn
PLAN = TuneOptions(trials=TRIALS, budget_s=None, device="Some CPU", target="cpu", variant="avx2")


def problem(choice: Choice) -> str:
    return "too many" if choice["rows"] * choice["depth"] > 12 * 2048 else ""


def function() -> tirx.PrimFunc:
    return definitions.matmul(load_scheme("q4f16_1"), load_layout("rows16"), 64, 32, "float32")


def task(bucket: str = "gemm") -> Task:
    knobs = {"rows": (2, 4, 6, 8, 12), "depth": (256, 512, 1024, 2048, 4096)}
    space = Space(bucket, 256, "gemm", knobs, DEFAULT, problem)
    return Task("0123456789abcdef", "matmul 64x32 int4", "cpu.int8_matmul", function(), space, 1)


@dataclass
class Device:
    """Takes what `seconds` says; counts what it is asked."""

    gain: float = 2.0
    failing: frozenset[int] = frozenset()
    opened: int = 0
    measured: list[dict[str, int]] = field(default_factory=list)

    def open(self, job: Mapping[str, Any]) -> dict[str, Any]:
        self.opened += 1
        return {"nbytes": 1000}

    def measure(self, choice: Mapping[str, int], pairs: int) -> list[tuple[float, float]]:
        assert not problem(choice), "a choice that cannot be compiled was proposed"
        self.measured.append(dict(choice))
        if choice["rows"] in self.failing:
            raise WorkerError("the measuring process died")
        return [(1e-3, self.seconds(choice))] * pairs

    def seconds(self, choice: Mapping[str, int]) -> float:
        best = choice["rows"] == 8
        return 1e-3 / self.gain if best else 1.1e-3


def quiet(state: State) -> None:
    """The progress goes nowhere."""


def run(folder: Path, device: Device, plan: TuneOptions = PLAN, tasks: tuple[Task, ...] = ()) -> list[State]:
    journal = Journal(folder, plan.target, plan.variant, plan.device)
    return list(tune(tasks or (task(),), plan, journal, device, quiet))


def test_the_best_is_found_measured_again_and_kept(tmp_path: Path) -> None:
    device = Device()
    (state,) = run(tmp_path, device)
    assert state.record is not None and state.record.knobs["rows"] == 8 and state.record.quartile == 2.0
    assert (state.record.default_us, state.record.tuned_us) == (1000.0, 500.0)
    assert len(device.measured) == TRIALS + 1 and DEFAULT not in device.measured
    tried = [tuple(choice.values()) for choice in device.measured[:-1]]
    assert len(set(tried)) == len(tried)


@pytest.mark.parametrize("gain", (0.9, 1.0, 1.015))
def test_what_does_not_win_by_more_than_the_noise_is_not_kept(gain: float, tmp_path: Path) -> None:
    (state,) = run(tmp_path, Device(gain))
    assert state.record is None


def test_a_candidate_that_fails_costs_only_itself(tmp_path: Path) -> None:
    (state,) = run(tmp_path, Device(failing=frozenset((2, 4, 12))))
    assert state.failed > 0 and state.record is not None and state.record.knobs["rows"] == 8
    (state,) = run(tmp_path / "all", Device(failing=frozenset((2, 4, 6, 8, 12))))
    assert state.failed == state.trials == TRIALS and state.record is None


def test_a_space_that_ends_ends_the_search(tmp_path: Path) -> None:
    device = Device(gain=0.5)
    (state,) = run(tmp_path, device, TuneOptions(100, None, "Some CPU", "cpu", "avx2"))
    assert state.trials == 5 * 5 - 1 - 2  # less the default and what cannot be compiled


def test_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    class Interrupted(Device):
        def measure(self, choice: Mapping[str, int], pairs: int) -> list[tuple[float, float]]:
            if len(self.measured) == 5:
                raise KeyboardInterrupt
            return super().measure(choice, pairs)

    first, second, third = Interrupted(), Device(), Device()
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, first)
    (path,) = tmp_path.glob("*.jsonl")
    with path.open("a") as file:
        file.write('{"key": ["0123456789abcdef", "cpu.int8')  # cut off in the middle of a line
    (state,) = run(tmp_path, second)
    assert state.trials == TRIALS and len(second.measured) == TRIALS - 5 + 1
    assert not [choice for choice in second.measured[:-1] if choice in first.measured]
    (again,) = run(tmp_path, third)
    assert third.opened == 0 and again.record == state.record  # all of it was in the journal
    other = TuneOptions(trials=TRIALS, budget_s=None, device="Another CPU", target="cpu", variant="avx2")
    assert run(tmp_path, Device(), other)[0].trials == TRIALS


def test_the_budget_ends_the_search_and_what_was_found_is_decided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    class Slow(Device):
        def measure(self, choice: Mapping[str, int], pairs: int) -> list[tuple[float, float]]:
            nonlocal now
            now += 0.05
            return [(1e-3, 0.5e-3)] * pairs

    monkeypatch.setattr("mlcpipe.tuning.run.time", SimpleNamespace(monotonic=lambda: now))
    tasks = tuple(task(bucket) for bucket in ("a", "b", "c", "d"))
    states = run(tmp_path, Slow(), TuneOptions(20, 1.0, "Some CPU", "cpu", "avx2"), tasks)
    assert [state.task.space.bucket for state in states] == ["a", "b", "c", "d"]
    assert 0 < states[0].trials < 20 and states[0].final is not None
    assert sum(state.trials for state in states) <= 20


def test_verifying_drops_what_no_longer_wins(tmp_path: Path) -> None:
    (state,) = run(tmp_path, Device())
    assert state.record is not None
    (kept,) = verify([task()], [state.record], PLAN, Device(1.5), quiet)
    assert kept.record is not None and kept.record.quartile == 1.5
    (lost,) = verify([task()], [state.record], PLAN, Device(1.0), quiet)
    assert lost.record is None and lost.final is not None
    (gone,) = verify([task()], [state.record], PLAN, Device(failing=frozenset((8,))), quiet)
    assert gone.invalid and gone.problem and gone.record is None
    strange = state.record.model_copy(update={"knobs": {"rows": 7, "depth": 1024}})
    (broken,) = verify([task()], [strange], PLAN, Device(), quiet)
    assert broken.invalid and "rows is 7" in broken.problem and broken.record is None
    assert not list(verify([task("other")], [state.record], PLAN, Device(), quiet))
