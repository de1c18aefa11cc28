"""How decode steps are launched on a device."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any


class StepRecorder:
    """Runs what one model launches on a device. This one just calls it; a subclass may record steps and replay them."""

    def run(self, work: Callable[[], Any], key: Hashable = None) -> Any:
        """The result of `work`, valid until the next call.

        A key other than None marks a decode step: launches of steps with equal keys differ only in numbers that were
        copied to the device beforehand. Any other work may allocate memory and free it.
        """
        return work()

    def close(self) -> None:
        """Free what was recorded."""
