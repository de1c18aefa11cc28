"""The display of `mlcpipe tune`: the best of each kernel and the time left; at the end a table and bars."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mlcpipe.cli.terminal import cell, new_table, say

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from mlcpipe.tuning.run import State, TuneOptions
    from mlcpipe.tuning.tasks import Task

_BAR = 30  # characters of the default's bar
_FINALS = 2  # the cost of a decision, in search trials


class View:
    """Keeps the last state of every task; shows them all on a terminal, elsewhere a line per finished one."""

    def __init__(self, console: Console, tasks: Sequence[Task], opts: TuneOptions) -> None:
        from rich.live import Live

        from mlcpipe.tuning.run import State

        self._console, self._opts = console, opts
        self._states = {task.key: State(task, device=opts.device, variant=opts.variant) for task in tasks}
        self._done: set[tuple[str, str, str]] = set()
        self._began, self._measured = time.monotonic(), 0
        self._known: dict[tuple[str, str, str], int] = {}
        self._live: Live | None = None
        if console.is_terminal and not console.is_dumb_terminal:
            self._live = Live(get_renderable=self._render, console=console, refresh_per_second=4, transient=True)

    @property
    def states(self) -> list[State]:
        """The last state of every task."""
        return list(self._states.values())

    def show(self, state: State) -> None:
        """Report a measurement."""
        before = self._known.setdefault(state.task.key, state.trials)
        self._known[state.task.key] = state.trials
        self._measured += max(0, state.trials - before)
        self._states[state.task.key] = state

    def done(self, state: State) -> None:
        """Report a decision."""
        self.show(state)
        self._done.add(state.task.key)
        if self._live is None:
            say(self._console, f"{state.task.name} {state.task.space.bucket}: {verdict(state)}")

    def __enter__(self) -> View:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def _render(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        table = new_table("kernel", "rows", "tried", "default", "best so far", "", whole="kernel")
        for state in self._states.values():
            tried = f"{state.trials}/{self._opts.trials}"
            times = [duration(state.default_s), f"{state.best.ratio:.2f}x" if state.best else ""]
            words = verdict(state) if state.task.key in self._done else ""
            table.add_row(*map(cell, (state.task.name, state.task.space.bucket, tried, *times, words)))
        return Group(table, Text(f"{len(self._done)} of {len(self._states)} decided, {self._left()}", style="dim"))

    def _left(self) -> str:
        passed = time.monotonic() - self._began
        if self._measured == 0:
            return f"{passed:.0f} s so far"
        open_ = [state for key, state in self._states.items() if key not in self._done]
        trials = sum(max(0, self._opts.trials - state.trials) + _FINALS for state in open_)
        left = trials * passed / self._measured
        if self._opts.budget_s is not None:
            left = min(left, max(0.0, self._opts.budget_s - passed))
        return f"about {left:.0f} s left"


def duration(seconds: float | None) -> str:
    """A time for people: "183 us", "7.95 ms"; "" if unknown."""
    if seconds is None:
        return ""
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def verdict(state: State) -> str:
    """A task's outcome, for people."""
    if state.problem:
        return state.problem
    if state.record is not None and state.final is not None:
        above = f"three quarters of {state.final.pairs} pairs above {state.final.quartile:.2f}x"
        return f"kept: {state.final.ratio:.2f}x, {above}"
    if state.final is not None:
        return f"the default stays: {state.final.ratio:.2f}x, a quarter of pairs below {state.final.quartile:.2f}x"
    if state.trials == state.failed:
        return "no time was left" if not state.trials else "no candidate ran"
    return "the default stays: no candidate was faster" if state.best and state.best.ratio <= 1 else "not decided"


def gain(states: Sequence[State]) -> float:
    """Geometric mean of default / new time, over all decided tasks."""
    decided = [state for state in states if state.best or state.final]
    ratios = [state.final.ratio if state.record and state.final else 1.0 for state in decided]
    return math.exp(statistics.fmean(map(math.log, ratios))) if ratios else 1.0


def floor_s(state: State, bandwidth_gb_s: float | None) -> float | None:
    """The least seconds to read and write a call's arguments; None if unknown."""
    return state.nbytes / bandwidth_gb_s / 1e9 if state.nbytes and bandwidth_gb_s else None


def summary(states: Sequence[State], opts: TuneOptions, bandwidth_gb_s: float | None) -> dict[str, Any]:
    """The result for JSON; times in microseconds."""
    return {
        "target": opts.target,
        "variant": opts.variant,
        "device": opts.device,
        "read_bandwidth_gb_s": None if bandwidth_gb_s is None else round(bandwidth_gb_s, 1),
        "gain": round(gain(states), 4),
        "kernels": [
            {
                "name": state.task.name,
                "kernel": state.task.kernel,
                "rule": state.task.rule,
                "bucket": state.task.space.bucket,
                "rows": state.task.space.rows,
                "uses": state.task.uses,
                "trials": state.trials,
                "failed": state.failed,
                "default_us": None if state.default_s is None else round(state.default_s * 1e6, 1),
                "best_ratio": None if state.best is None else round(state.best.ratio, 4),
                "final": None if state.final is None else vars(state.final),
                "floor_us": None if (floor := floor_s(state, bandwidth_gb_s)) is None else round(floor * 1e6, 1),
                "record": None if state.record is None else state.record.model_dump(mode="json"),
                "verdict": verdict(state),
            }
            for state in states
        ],
    }


def print_result(console: Console, states: Sequence[State], opts: TuneOptions, bandwidth_gb_s: float | None) -> None:
    """The table, then a bar for each kernel: default, tuned, and the floor that the memory sets."""
    table = new_table("kernel", "rows", "default", "tuned", "floor", "tried", "", whole="kernel")
    for state in states:
        tuned = state.final.candidate_s if state.record is not None and state.final is not None else None
        floor = floor_s(state, bandwidth_gb_s)
        values = (duration(state.default_s), duration(tuned), duration(floor), str(state.trials), verdict(state))
        table.add_row(*map(cell, (state.task.name, f"{state.task.space.bucket} ({state.task.space.rows})", *values)))
    console.print(table)
    _print_bars(console, states, bandwidth_gb_s)
    kept = sum(state.record is not None for state in states)
    say(
        console,
        f"\n{kept} of {len(states)} kept, {gain(states):.3f}x in the geometric mean on {opts.device}, variant "
        f"{opts.variant}" + (f"; floor: the arguments at {bandwidth_gb_s:.0f} GB/s" if bandwidth_gb_s else ""),
    )


def _print_bars(console: Console, states: Sequence[State], bandwidth_gb_s: float | None) -> None:
    """Time relative to the default's: filled the new time, light the saved part, a mark at the floor."""
    say(console, "")
    width = max((len(f"{state.task.name} {state.task.space.bucket}") for state in states), default=0)
    for state in states:
        if state.default_s is None:
            continue
        now = 1 / state.final.ratio if state.record is not None and state.final is not None else 1.0
        filled = max(1, min(_BAR, round(_BAR * now)))
        bar = list("█" * filled + "░" * (_BAR - filled))
        floor = floor_s(state, bandwidth_gb_s)
        if floor is not None:
            bar[min(_BAR - 1, int(_BAR * floor / state.default_s))] = "|"
        title = f"{state.task.name} {state.task.space.bucket}".ljust(width)
        say(console, f"{title}  {''.join(bar)}  {100 * now:.0f} %")
