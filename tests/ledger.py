"""The ledger of CPU time, `times.json`: seconds of each tier, and of each file that takes `LISTED_S` or more.

What workers share (`once.shared_work`) counts in the tier alone, as the test that has it differs from run to run. A run
warns of each file and tier that takes `FACTOR` times what is written; machines and what else they do differ by less. With
MLCPIPE_TEST_TIMES=check it fails as well, with MLCPIPE_TEST_TIMES=write a run of a whole tier writes its seconds instead.
No landing depends on times, so neither `make` nor `.ci/run` sets it.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

PATH = Path(__file__).with_name("times.json")
FACTOR = 3
LISTED_S = 10
SMALLEST_S = 60  # of a file that may fail a run: whichever comes first compiles kernels that others share
SHARED = "shared"


def spent(reports: Iterable[Any]) -> Counter[str]:
    """Seconds by file of tests' reports, and of `SHARED` work."""
    seconds: Counter[str] = Counter()
    for report in reports:
        found = dict(report.user_properties)
        seconds[report.nodeid.partition("::")[0]] += found.get("cpu_s", 0.0) - found.get("shared_s", 0.0)
        seconds[SHARED] += found.get("shared_s", 0.0)
    return seconds


def mode() -> str:
    """What a run does with its seconds: "warn", "check" or "write"."""
    found = os.environ.get("MLCPIPE_TEST_TIMES", "warn")
    if found not in ("warn", "check", "write"):
        raise pytest.UsageError(f"MLCPIPE_TEST_TIMES; expected check or write; found {found}")
    return found


def compare(tier: str, seconds: Mapping[str, float], path: Path = PATH) -> list[str]:
    """One line for the tier and for each file that outgrew the ledger. Of some of a tier's tests the sums are smaller."""
    times = json.loads(path.read_text(encoding="utf-8"))
    if mode() == "write":
        path.write_text(json.dumps(times | {tier: _written(seconds)}, indent=2) + "\n", encoding="utf-8")
        return []
    written = times[tier]
    found = {"all of it": sum(seconds.values()), **seconds}
    limits = {name: max(SMALLEST_S, FACTOR * written.get(name, 0)) for name in found if name != SHARED}
    return [
        f"{tier} tier, {name}: CPU time; expected at most {limit:.0f} s, {FACTOR} times tests/times.json; "
        f"found {found[name]:.0f} s; make it cheaper, or write its time with MLCPIPE_TEST_TIMES=write"
        for name, limit in limits.items()
        if found[name] > limit
    ]


def longest_first(tier: str, names: Sequence[str], path: Path = PATH) -> list[int]:
    """The order of tests in which files that take long come first: no worker is left with one of them at the end."""
    times = json.loads(path.read_text(encoding="utf-8"))[tier]
    return sorted(range(len(names)), key=lambda i: -times.get(names[i].partition("::")[0], 0))


def _written(seconds: Mapping[str, float]) -> dict[str, int]:
    files = {name: round(found) for name, found in sorted(seconds.items()) if found >= LISTED_S}
    return {"all of it": round(sum(seconds.values())), **files}
