"""What devices share: checks of a case's calls, and errors that one process writes for another."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

from tests.kernels.cases.gpu import CASES
from tests.kernels.cases.gpu.case import Array, Call, Case

ERRORS = "errors.json"


def check_calls(case: Case, run: Callable[[Call], list[Array]]) -> None:
    """Run each call and check it."""
    for call in case.calls():
        call.check(run(call))


def error_of(check: Callable[[], None]) -> str:
    """The error of a check, "" if there is none."""
    try:
        check()
    except (AssertionError, RuntimeError) as error:
        return str(error).strip()[-500:] or type(error).__name__
    return ""


def write_errors(check: Callable[[Case], None], names: Iterable[str], folder: Path) -> None:
    """The error of each named case, as JSON."""
    errors = {name: error_of(lambda name=name: check(CASES[name])) for name in names}  # type: ignore[misc]
    (folder / ERRORS).write_text(json.dumps(errors), encoding="utf-8")
