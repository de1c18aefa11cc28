"""Work whose result all of pytest's workers share."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

# `once(name, work)`: what `work(folder)` returns, as JSON, or the errors.json that it writes.
Once = Callable[[str, Callable[[Path], Any]], Any]
_depth, _began, _shared_s = 0, 0.0, 0.0  # of `shared_work`


def cpu_s() -> float:
    """Seconds of CPU time of this process and of its children that ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def shared_s() -> float:
    """Of `cpu_s`, seconds of `shared_work`, which belong to no test: the first that asks has them."""
    return _shared_s


@contextmanager
def shared_work() -> Iterator[None]:
    """What all workers share is made."""
    global _depth, _began, _shared_s
    _began, _depth = _began if _depth else cpu_s(), _depth + 1
    try:
        yield
    finally:
        _depth -= 1
        _shared_s += 0.0 if _depth else cpu_s() - _began


@pytest.fixture(scope="session", name="shared")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this run that all workers have."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def once(shared: Path) -> Once:
    """Runs each named work in the first worker that asks; the others wait and read its result."""

    def run(name: str, work: Callable[[Path], Any]) -> Any:
        folder = shared / name
        folder.mkdir(exist_ok=True)
        result = folder / "errors.json"
        with FileLock(folder / "lock"), shared_work():
            if not result.exists():
                made = work(folder)
                if made is not None:
                    result.write_text(json.dumps(made), encoding="utf-8")
        return json.loads(result.read_text(encoding="utf-8"))

    return run
