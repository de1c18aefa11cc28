"""The ledger of CPU time: a run warns of what outgrew it and fails where asked, and what was written fits."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from tests import ledger, tiers

ROOT = Path(__file__).parents[2]
WRITTEN = {"fast": {"all of it": 100, "tests/a.py": 30}, "full": {"all of it": 50}}


@pytest.fixture
def times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "times.json"
    path.write_text(json.dumps(WRITTEN))
    monkeypatch.delenv("MLCPIPE_TEST_TIMES", raising=False)
    return path


@pytest.mark.parametrize(
    ("seconds", "grown"),
    [
        ({"tests/a.py": 89, "tests/b.py": 59, ledger.SHARED: 150}, []),
        ({"tests/a.py": 91}, ["tests/a.py"]),
        ({"tests/a.py": 1, "tests/b.py": 61}, ["tests/b.py"]),  # which is not in the ledger
        ({"tests/a.py": 1, ledger.SHARED: 300}, ["all of it"]),
    ],
)
def test_what_outgrows_it_is_named(seconds: dict[str, float], grown: list[str], times: Path) -> None:
    assert [line.split(", ")[1].split(":")[0] for line in ledger.compare("fast", seconds, times)] == grown


def test_a_run_is_written_where_asked(times: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLCPIPE_TEST_TIMES", "write")
    assert ledger.compare("full", {"tests/b.py": 400.4, "tests/c.py": 9.9, ledger.SHARED: 90.0}, times) == []
    found = json.loads(times.read_text())
    assert found == {**WRITTEN, "full": {"all of it": 500, ledger.SHARED: 90, "tests/b.py": 400}}


def test_files_that_take_long_come_first_and_stay_whole(times: Path) -> None:
    times.write_text(json.dumps({"full": {"all of it": 99, "b.py": 10, "c.py": 30}}))
    names = ["a.py::one", "b.py::one", "b.py::two", "c.py::one", "d.py::one"]
    assert [names[i] for i in ledger.longest_first("full", names, times)] == [
        "c.py::one", "b.py::one", "b.py::two", "a.py::one", "d.py::one",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "seconds", "status", "said"),
    [(None, 9999.0, 0, "yellow"), ("check", 9999.0, 1, "red"), ("check", 1.0, 0, ""), (None, 1.0, 0, "")],
)
def test_only_a_run_that_checks_times_fails(
    asked: str | None, seconds: float, status: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLCPIPE_TEST_TOOLS", raising=False)
    monkeypatch.delenv("MLCPIPE_TEST_TIMES", raising=False)
    if asked:
        monkeypatch.setenv("MLCPIPE_TEST_TIMES", asked)
    lines: list[str] = []
    reports = [SimpleNamespace(nodeid="tests/a.py::t", user_properties=[("cpu_s", seconds)])]
    reporter = SimpleNamespace(
        stats={"passed": reports},
        write_line=lambda text, **colors: lines.append(next(name for name, used in colors.items() if used)),
    )
    plugins = SimpleNamespace(get_plugin=lambda name: reporter)
    config = SimpleNamespace(pluginmanager=plugins, option=SimpleNamespace(markexpr=tiers.FAST))
    session = SimpleNamespace(config=config, exitstatus=0)
    tiers.pytest_sessionfinish(cast(pytest.Session, session))
    assert (session.exitstatus, "".join(lines)) == (status, said)


def test_another_word_for_times_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLCPIPE_TEST_TIMES", "1")
    with pytest.raises(pytest.UsageError, match="expected check or write; found 1"):
        ledger.mode()


def test_shared_work_belongs_to_no_file() -> None:
    reports = [SimpleNamespace(nodeid="tests/a.py::t[1]", user_properties=[("cpu_s", 5.0), ("shared_s", 3.0)])] * 2
    assert ledger.spent(reports) == {"tests/a.py": 4.0, ledger.SHARED: 6.0}


def test_files_of_the_ledger_exist() -> None:
    written = json.loads(ledger.PATH.read_text(encoding="utf-8"))
    names = {name for files in written.values() for name in files} - {"all of it", ledger.SHARED}
    assert sorted(name for name in names if not (ROOT / name).is_file()) == []


@pytest.mark.parametrize("tier", [tiers.FAST, tiers.FULL, tiers.BOTH])
def test_tiers_are_those_of_the_makefile(tier: str) -> None:
    assert f'-m "{tier}"' in (ROOT / "Makefile").read_text(encoding="utf-8")
