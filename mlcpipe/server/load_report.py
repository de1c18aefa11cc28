"""How far the load of a model is, for those who wait."""

from __future__ import annotations

from typing import Any


class LoadReport:
    """A `Progress` that keeps the last stage; written by the loading thread, read by the event loop."""

    def __init__(self) -> None:
        self._stage, self._total, self._done = "wait for another load", 0, 0
        self.stopped = False  # nobody waits any more: set by the event loop, read by the loading thread

    def stage(self, name: str) -> None:
        """Begin a stage."""
        self._stage, self._total, self._done = name, 0, 0

    def bytes_total(self, n: int) -> None:
        """The stage has so many bytes."""
        self._total = n

    def steps_total(self, n: int) -> None:
        """The stage has so many steps."""
        self._total = n

    def advance(self, n: int) -> None:
        """So many more are done."""
        self._done += n

    def note(self, text: str) -> None:
        """Notes are for the terminal."""

    @property
    def share(self) -> float | None:
        """The part of the stage that is done, 0 to 1; None if it has no known length."""
        return min(1.0, self._done / self._total) if self._total else None

    @property
    def words(self) -> str:
        """For people: the stage, and its share."""
        share = self.share
        return self._stage if share is None else f"{self._stage}, {100 * share:.0f}%"

    @property
    def described(self) -> dict[str, Any]:
        """For programs."""
        return {"stage": self._stage, "share": self.share}
