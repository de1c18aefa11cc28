"""What is wrong with how a damaged file was read or refused."""

from __future__ import annotations

import time
from collections.abc import Callable

from mlcpipe.errors import MlcpipeError

MAX_SECONDS = 10.0  # of one case: what loops without end, on a slow machine
MAX_LINE = 4000


def finding(read: Callable[[], None]) -> str:
    """What is wrong with how `read` ended; empty if nothing is."""
    began = time.process_time()
    try:
        read()
    except MlcpipeError as error:
        line = str(error)
        if "\n" in line or len(line) > MAX_LINE or not line.isprintable():
            return f"not a line: {line[:200]!r}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    seconds = time.process_time() - began
    return f"took {seconds:.0f} s" if seconds > MAX_SECONDS else ""
