"""What is wrong with how a damaged file was read or refused."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from mlcpipe.errors import MlcpipeError

MAX_SECONDS = 10.0  # of one case: what loops without end, on a slow machine
MAX_LINE = 4000
MOST = 10  # findings of a run


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


def fuzz(make: Callable[[int], None], read: Callable[[], None], seeds: Iterable[int], seconds: float) -> list[str]:
    """The findings where `make` writes the case of each of `seeds`, until `seconds` have passed, each with its seed."""
    findings, ends = [], time.monotonic() + seconds
    for seed in seeds:
        make(seed)
        if found := finding(read):
            findings.append(f"seed {seed}: {found}")
        if time.monotonic() > ends or len(findings) >= MOST:
            break
    return findings
