"""Debug output on stderr by MLCPIPE_DEBUG: 1 timings, 2 the rule of every PrimFunc, 3 the IR, 4 generated source."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from mlcpipe.support.env import debug_level

TIMINGS, RULES, IR, SOURCE = 1, 2, 3, 4


def show(level: int, text: Callable[[], str]) -> None:
    """Write `text()` to stderr if MLCPIPE_DEBUG is at least `level`; otherwise do not compute it."""
    if debug_level() >= level:
        sys.stderr.write(text().rstrip() + "\n")


def show_time(what: str, began: float) -> None:
    """Write the milliseconds since `began`, a value of `time.perf_counter`."""
    taken_s = time.perf_counter() - began
    show(TIMINGS, lambda: f"{1e3 * taken_s:8.1f} ms  {what}")
