"""Launches decode steps on a device."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any


class StepRecorder:
    """Runs the launches of one model on a device: here by calling them; a subclass may record and replay steps."""

    def run(self, work: Callable[[], Any], key: Hashable = None) -> Any:
        """The result of `work`, valid until the next call.

        A key other than None marks a decode step: launches of steps with equal keys differ only in numbers that were
        copied to the device beforehand. Other work may allocate and free memory.
        """
        return work()

    def close(self) -> None:
        """Free the recorded steps."""
