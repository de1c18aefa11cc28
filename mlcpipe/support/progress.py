"""Progress reports of long operations: the protocol, a silent implementation, and one for terminals.

The compiler and the weight converter call `stage`, `bytes_total` and `advance`; they never print.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar


class Progress(Protocol):
    """Receives the progress of a long operation."""

    def stage(self, name: str) -> None:
        """End the previous stage and begin a new one; `name` is for display ("convert weights")."""

    def bytes_total(self, n: int) -> None:
        """The current stage will process `n` bytes in total."""

    def steps_total(self, n: int) -> None:
        """The current stage will take `n` steps in total."""

    def advance(self, n: int) -> None:
        """The current stage has processed `n` more bytes or steps."""

    def note(self, text: str) -> None:
        """Show one line between two stages."""


class SilentProgress:
    """Ignores every report; for libraries and tests."""

    def stage(self, name: str) -> None:
        """Nothing to show."""

    def bytes_total(self, n: int) -> None:
        """Nothing to show."""

    def steps_total(self, n: int) -> None:
        """Nothing to show."""

    def advance(self, n: int) -> None:
        """Nothing to show."""

    def note(self, text: str) -> None:
        """Nothing to show."""


@dataclass(frozen=True)
class StageTime:
    """Duration of one stage in seconds, and the bytes it processed (0 if it counts none)."""

    name: str
    seconds: float
    bytes_done: int


class ConsoleProgress:
    """Shows the current stage with elapsed time, and bytes and remaining time if known; records stage times.

    A terminal shows one live line per stage; a log file gets one line when a stage ends.
    With `lasting`, a finished stage also leaves its line on a terminal.
    """

    def __init__(self, console: Console, *, lasting: bool = True) -> None:
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            SpinnerColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )
        from rich.progress import Progress as Bar

        self._console = console
        self._lasting = lasting or not console.is_terminal
        self._stages: list[StageTime] = []
        self._name: str | None = None
        self._began = 0.0
        self._done = 0
        self._bytes = True  # the unit of `_done`; else steps
        text = TextColumn("{task.description}", markup=False)
        self._spinner = Bar(SpinnerColumn(), text, TimeElapsedColumn(), console=console, transient=True)
        self._bar, self._steps = (
            Bar(
                SpinnerColumn(),
                text,
                BarColumn(bar_width=30),
                done,
                TimeRemainingColumn(compact=True, elapsed_when_finished=True),
                console=console,
                transient=True,
            )
            for done in (DownloadColumn(binary_units=True), MofNCompleteColumn())
        )
        self._live: Bar | None = None

    @property
    def stages(self) -> list[StageTime]:
        """The finished stages, in order."""
        return list(self._stages)

    def note(self, text: str) -> None:
        """Write one line between stages."""
        self.finish()
        self._console.print(text, style="dim", highlight=False, markup=False)

    def stage(self, name: str) -> None:
        """End the current stage and show `name` as the new one."""
        self.finish()
        self._name, self._began, self._done = name, time.perf_counter(), 0
        self._bytes = True
        self._show(self._spinner, None)

    def bytes_total(self, n: int) -> None:
        """Turn the current stage's line into a bar over `n` bytes."""
        self._show(self._bar, n)
        if self._done:
            self.advance(0)

    def steps_total(self, n: int) -> None:
        """Turn the current stage's line into a bar over `n` steps."""
        self._bytes = False
        self._show(self._steps, n)

    def advance(self, n: int) -> None:
        """Move the bar by `n` bytes or steps."""
        self._done += n
        if self._live in (self._bar, self._steps):
            for task in self._live.task_ids:
                self._live.update(task, completed=self._done)

    def finish(self) -> None:
        """End the current stage: record its time and write one lasting line."""
        self._hide()
        if self._name is None:
            return
        done = StageTime(self._name, time.perf_counter() - self._began, self._done if self._bytes else 0)
        self._stages.append(done)
        self._name = None
        if not self._lasting:
            return
        size = f", {done.bytes_done / 2**20:,.1f} MiB" if done.bytes_done else ""
        self._console.print(f"{done.name}: {done.seconds:.1f} s{size}", style="dim", highlight=False, markup=False)

    def abandon(self) -> None:
        """Remove the live line without recording the stage: the work failed or was stopped."""
        self._hide()
        self._name = None

    def _show(self, live: Bar, total: int | None) -> None:
        self._hide()
        if not self._console.is_terminal or self._console.is_dumb_terminal:
            return
        live.add_task(self._name or "working", total=total)
        live.start()
        self._live = live

    def _hide(self) -> None:
        if self._live is None:
            return
        self._live.stop()
        for task in self._live.task_ids:
            self._live.remove_task(task)
        self._live = None


@contextmanager
def console_progress(console: Console, *, lasting: bool = True) -> Iterator[ConsoleProgress]:
    """A ConsoleProgress whose live line is removed on every exit."""
    progress = ConsoleProgress(console, lasting=lasting)
    try:
        yield progress
    except BaseException:
        progress.abandon()
        raise
    progress.finish()
