"""Which slots have the states of a single conversation after some of its lengths, where another turn may begin.

A step reads the states after the tokens so far and writes those after its own: in place, but where the ones before are
kept, at the end of a prompt, say. Should a step in place fail, there is no state after these tokens any more.
"""

from __future__ import annotations

from tir_schedules.step_layout import PAGE

MIN_CHECKPOINT_TOKENS = 64  # what computing again must cost to be worth a slot


class SlotHistory:
    """So many slots, none for a model without states in them. -1 is no slot: zeros, before the first token."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._at: dict[int, int] = {}  # length -> slot, the oldest first
        self._kept: set[int] = set()

    def of(self, length: int) -> int:
        """The slot with the states after so many tokens."""
        return self._at.get(length, -1)

    def usable(self, length: int) -> int:
        """The most tokens, up to so many, after which the states are known."""
        return length if not self._count else max((at for at in self._at if at <= length), default=0)

    def keep(self, length: int) -> None:
        """The states after so many tokens stay, until others that are kept take their place."""
        self._kept.add(length)

    def write(self, length: int) -> tuple[int, int]:
        """(slot to read, slot to write) of a step after so many tokens."""
        if not self._count:
            return -1, -1
        before = self.of(length)
        if before >= 0 and length not in self._kept:
            del self._at[length]
            return before, before
        free = set(range(self._count)) - set(self._at.values())
        if not free:
            oldest = next(at for at in self._at if at != length)
            self._kept.discard(oldest)
            free = {self._at.pop(oldest)}
        return before, min(free)

    def written(self, length: int, slot: int) -> None:
        """The step has succeeded, and the sequence has so many tokens now."""
        if slot >= 0:
            self._at[length] = slot

    def forget_after(self, length: int) -> None:
        """The tokens after so many are others from now on."""
        self._at = {at: slot for at, slot in self._at.items() if at <= length}
        self._kept = {at for at in self._kept if at <= length}

    def cut(self, begin: int, end: int) -> int:
        """Where a prompt of `end` tokens, of which `begin` are there, is computed in two parts, or `end`.

        A prompt that begins with this one may start there.
        """
        last = (end - 1) // PAGE * PAGE
        return last if self._count and last - begin >= MIN_CHECKPOINT_TOKENS else end
