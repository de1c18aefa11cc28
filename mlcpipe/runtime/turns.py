"""Whose work last took memory on a device.

A recorded step writes to the addresses that it was recorded with, which the pools of TVM's virtual machines count as
free between steps. That is right as long as nobody else takes memory or gives it back: who does, has a turn.
"""

from __future__ import annotations

import functools
import threading


class Turns:
    """`lock` is held while work is given to a device and by whoever frees memory; `last` had the last turn, or None."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.last: object = None


@functools.cache
def turns() -> Turns:
    """Those of this process, whose pools all its devices share."""
    return Turns()
