"""Tunes a model's kernels: search, decide, record; or remeasures records and drops those that lose."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import Any, Protocol

from mlcpipe.errors import MlcpipeError
from mlcpipe.tuned.records import Record
from mlcpipe.tuning.journal import Journal, Trial
from mlcpipe.tuning.noise import Verdict, judge
from mlcpipe.tuning.search import Search, new_cost_model
from mlcpipe.tuning.tasks import Task

SEARCH_PAIRS, FINAL_PAIRS = 5, 24
_BATCH = 4  # candidates proposed before the cost model is updated
_FINALISTS = 2
_SHARES = 2  # even shares of the remaining budget that a task may take


class Measurer(Protocol):
    """The measuring interface: `pool.WorkerProcess`."""

    def open(self, job: Mapping[str, Any]) -> dict[str, Any]: ...

    def measure(self, choice: Mapping[str, int], pairs: int) -> list[tuple[float, float]]: ...


@dataclass(frozen=True)
class State:
    """Tuning progress of one task on a device: `best` so far, then the `final` decision.

    `default_s` is the default's median time, `nbytes` the bytes that a call reads and writes. `problem` is why
    nothing was measured; `invalid` if the record itself is at fault.
    """

    task: Task
    device: str = ""
    variant: str = ""
    trials: int = 0
    failed: int = 0
    default_s: float | None = None
    best: Verdict | None = None
    choice: Mapping[str, int] | None = None
    final: Verdict | None = None
    record: Record | None = None
    nbytes: int = 0
    problem: str = ""
    invalid: bool = False


@dataclass(frozen=True)
class TuneOptions:
    """Limits of a run (candidates per task, total seconds, None for no limit) and the device to measure on.

    `board` has the `host` and `arch` of an `ssh.Board`, for the CPU of another machine.
    """

    trials: int
    budget_s: float | None
    device: str
    target: str
    variant: str
    board: Mapping[str, str] | None = None
    seed: int = 0
    search_pairs: int = SEARCH_PAIRS
    final_pairs: int = FINAL_PAIRS


Report = Callable[[State], None]


def job_of(task: Task, opts: TuneOptions) -> dict[str, Any]:
    """The worker's job to open a task."""
    import tvm

    return {
        "target": opts.target,
        "variant": opts.variant,
        "board": opts.board,
        "rule": task.rule,
        "rows": task.space.rows,
        "keys": task.space.keys,
        "func": str(tvm.ir.save_json(task.func)),
    }


def tune(
    tasks: Sequence[Task], opts: TuneOptions, journal: Journal, measurer: Measurer, report: Report
) -> Iterator[State]:
    """Tune `tasks` in order; yields the state of each.

    Tasks with the most work come first, and may take twice an even share of the remaining budget. `report` is called
    after every trial.
    """
    models: dict[tuple[str, ...], Any] = {}
    ends = None if opts.budget_s is None else time.monotonic() + opts.budget_s
    for index, task in enumerate(tasks):
        names = (task.rule, *task.space.knobs)
        if names not in models:
            models[names] = new_cost_model(1)
        now = time.monotonic()
        share = None if ends is None else now + _SHARES * max(0.0, ends - now) / (len(tasks) - index)
        share = share if ends is None or share is None else min(share, ends)
        yield _tune_one(task, opts, journal, measurer, report, models[names], share)


def _tune_one(
    task: Task, opts: TuneOptions, journal: Journal, measurer: Measurer, report: Report, model: Any, ends: float | None
) -> State:
    known = journal.of(task.key)
    searched = [trial for trial in known if not trial.final]
    state = _with_best(State(task, opts.device, opts.variant), searched)
    if known and known[-1].final and len(searched) >= opts.trials:
        state = _with_final(state, known[-1], opts)
        report(state)
        return state
    if ends is not None and time.monotonic() >= ends:
        return state
    try:
        state = replace(state, nbytes=int(measurer.open(job_of(task, opts))["nbytes"]))
    except MlcpipeError as error:
        state = replace(state, problem=str(error))
        report(state)
        return state
    search = Search(task.space, f"{task.name} {task.space.bucket}", task.facts, model, opts.seed)
    search.learn([(trial.choice, _relative(trial)) for trial in searched])
    report(state)
    while len(searched) < opts.trials:
        proposed = search.propose(min(_BATCH, opts.trials - len(searched)))
        if not proposed:
            break
        batch = []
        for choice in proposed:
            trial = _try(task, choice, opts.search_pairs, measurer)
            journal.add(trial)
            batch.append(trial)
            searched.append(trial)
            state = _with_best(replace(state, best=None), searched)
            report(state)
            if ends is not None and time.monotonic() >= ends:
                return _decide(state, searched, opts, journal, measurer, report)
        search.learn([(trial.choice, _relative(trial)) for trial in batch])
    return _decide(state, searched, opts, journal, measurer, report)


def _relative(trial: Trial) -> float | None:
    """The search objective: time relative to the adjacent default's, which drifts less than seconds."""
    return None if trial.verdict is None else 1.0 / trial.verdict.ratio


def _try(task: Task, choice: Mapping[str, int], pairs: int, measurer: Measurer, final: bool = False) -> Trial:
    try:
        return Trial(task.key, choice, judge(measurer.measure(choice, pairs)), final)
    except MlcpipeError:
        return Trial(task.key, choice, None, final)


def _ranked(searched: Sequence[Trial]) -> list[Trial]:
    """The measured trials, best first."""
    good = [trial for trial in searched if trial.verdict is not None]
    return sorted(good, key=lambda trial: -trial.verdict.ratio if trial.verdict else 0.0)


def _with_best(state: State, searched: Sequence[Trial]) -> State:
    best = next(iter(_ranked(searched)), None)
    state = replace(state, trials=len(searched), failed=sum(trial.verdict is None for trial in searched))
    if best is None or best.verdict is None:
        return state
    return replace(state, best=best.verdict, choice=best.choice, default_s=best.verdict.default_s)


def _decide(
    state: State, searched: Sequence[Trial], opts: TuneOptions, journal: Journal, measurer: Measurer, report: Report
) -> State:
    """Measure new pairs for the best of the search; if it loses, for the next best."""
    for trial in _ranked(searched)[:_FINALISTS]:
        if trial.verdict is None or trial.verdict.ratio <= 1:
            break
        last = _try(state.task, trial.choice, opts.final_pairs, measurer, final=True)
        journal.add(last)
        state = _with_final(state, last, opts)
        if state.record is not None:
            break
    report(state)
    return state


def _with_final(state: State, last: Trial, opts: TuneOptions) -> State:
    verdict = last.verdict
    if verdict is None:
        return state
    state = replace(state, final=verdict, choice=last.choice, default_s=verdict.default_s, record=None)
    return replace(state, record=record_of(state.task, last.choice, verdict, opts)) if verdict.wins else state


def record_of(task: Task, choice: Mapping[str, int], verdict: Verdict, opts: TuneOptions) -> Record:
    """The record of a winning choice."""
    return Record(
        kernel=task.kernel,
        name=task.name,
        rule=task.rule,
        bucket=task.space.bucket,
        variant=opts.variant,
        device=opts.device,
        knobs=dict(choice),
        default_us=round(verdict.default_s * 1e6, 1),
        tuned_us=round(verdict.candidate_s * 1e6, 1),
        quartile=round(verdict.quartile, 3),
        pairs=verdict.pairs,
        date=date.today().isoformat(),
    )


def verify(
    tasks: Sequence[Task], records: Sequence[Record], opts: TuneOptions, measurer: Measurer, report: Report
) -> Iterator[State]:
    """Measure the tasks' records again; a state has its record, with new times, if it still wins."""
    for task in tasks:
        for record in filter(task.is_of, records):
            state = State(task, opts.device, opts.variant, choice=record.knobs)
            problem = task.space.check(record.knobs)
            state = replace(state, invalid=bool(problem))
            try:
                if not problem:
                    state = replace(state, nbytes=int(measurer.open(job_of(task, opts))["nbytes"]))
                    state = replace(state, invalid=True)  # a failure from here on is the record's, not the default's
                    trial = Trial(task.key, record.knobs, judge(measurer.measure(record.knobs, opts.final_pairs)), True)
                    state = _with_final(replace(state, invalid=False), trial, opts)
            except MlcpipeError as error:
                problem = str(error)
            state = replace(state, problem=problem)
            report(state)
            yield state
