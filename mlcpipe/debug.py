"""What MLCPIPE_DEBUG shows on stderr: 1 timings, 2 the rule of every PrimFunc, 3 the IR, 4 generated source."""

from __future__ import annotations

import sys
from collections.abc import Callable

from mlcpipe.env import env

TIMINGS, RULES, IR, SOURCE = 1, 2, 3, 4


def show(level: int, text: Callable[[], str]) -> None:
    """Write `text()` to stderr if MLCPIPE_DEBUG is at least `level`; otherwise it is not even computed."""
    if env().debug >= level:
        sys.stderr.write(text().rstrip() + "\n")
