"""Records as data from elsewhere: what is taken, what is refused, how files are merged and written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlcpipe.errors import ConfigError
from mlcpipe.targets import load_target
from mlcpipe.tuned import records as module
from mlcpipe.tuned.records import MAX_BYTES, merged, read_records, tuned_for, write_records
from tests.unit.tuning.records import GOOD, record


def file_of(tmp_path: Path, *entries: dict[str, Any], version: object = 1) -> Path:
    path = tmp_path / "records.json"
    path.write_text(json.dumps({"version": version, "records": list(entries)}))
    return path


def test_a_file_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "records.json"
    both = merged([record(bucket="gemm"), record()])
    write_records(path, both)
    assert read_records(path) == both
    before = path.read_bytes()
    write_records(path, reversed(read_records(path)))
    assert path.read_bytes() == before  # sorted: a diff has only what changed
    assert max(map(len, before.splitlines())) < 200 and len(before.splitlines()) == 3 + 3 * 2 + 2
    write_records(path, [])
    assert not path.exists() and read_records(path) == ()


def test_the_last_record_of_a_key_wins() -> None:
    old, new, other = record(), record(tuned_us=70.0, date="2026-12-01"), record(device="Another CPU")
    assert merged([old, other], [new]) == (other, new)
    assert new.title == "gemv 1.43x on Some CPU @ 3 GHz, 2026-12-01"


@pytest.mark.parametrize(
    "changes",
    (
        {"kernel": "../../etc/passwd"},
        {"kernel": "0123456789ABCDEF"},
        {"rule": "__import__('os').system('true')"},
        {"knobs": {}},
        {"knobs": {"int8_rows": -1}},
        {"knobs": {"int8_rows": 2**31}},
        {"knobs": {"int8_rows": "6"}},
        {"knobs": {"int8_rows": 6.5}},
        {"knobs": {"int8_rows": True}},
        {"knobs": {"a b": 1}},
        {"knobs": {f"k{i}": 1 for i in range(33)}},
        {"device": "\x1b[31mred"},
        {"device": "x" * 201},
        {"tuned_us": float("nan")},
        {"tuned_us": 0.0},
        {"pairs": 0},
        {"date": "yesterday"},
        {"surprise": 1},
    ),
    ids=lambda changes: "-".join(changes),
)
def test_what_is_no_record_is_refused_in_one_line(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tune again") as caught:
        read_records(file_of(tmp_path, GOOD, {**GOOD, **changes}))
    assert "records" in str(caught.value) and "\n" not in str(caught.value)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"records\.0\.rule"):
        read_records(file_of(tmp_path, {name: value for name, value in GOOD.items() if name != "rule"}))


@pytest.mark.parametrize("version", (0, 2, "1", None, True, [1]))
def test_another_version_is_refused(version: object, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unsupported version"):
        read_records(file_of(tmp_path, GOOD, version=version))


@pytest.mark.parametrize("text", ("", "{", "[]", '{"version": 1}', "[" * 100_000, "\xff"))
def test_broken_files_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "records.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError):
        read_records(path)


def test_a_huge_file_is_not_parsed(tmp_path: Path) -> None:
    path = tmp_path / "records.json"
    path.write_bytes(b" " * (MAX_BYTES + 1))
    with pytest.raises(ConfigError, match="too large"):
        read_records(path)


def test_records_are_of_one_device_and_the_users_own_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped, cache, target = (
        tmp_path / "site" / "tir_schedules" / "tuned",
        tmp_path / "cache",
        load_target("cpu-native"),
    )
    monkeypatch.setattr(module, "tuned_path", lambda: shipped)
    write_records(shipped / "cpu.json", [record(), record(bucket="gemm"), record(device="Another CPU")])
    write_records(cache / "tuned" / "cpu.json", [record(tuned_us=70.0)])
    found = tuned_for(target, "Some CPU @ 3 GHz", cache).records
    assert [(one.bucket, one.tuned_us) for one in found] == [("gemm", 80.0), ("gemv", 70.0)]
    assert module.files_of(target, cache)[-1] == cache / "tuned" / "cpu.json"  # new ones go there


def test_the_records_that_come_along_are_whole() -> None:
    files = sorted(module.tuned_path().glob("*.json"))
    assert files
    for path in files:
        found = read_records(path)
        assert found == merged(found)
        load_target(path.stem)
