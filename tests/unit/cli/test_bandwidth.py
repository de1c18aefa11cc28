"""The measured read bandwidth: a plausible number, remembered for this boot only."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlcpipe.errors import UsageError
from mlcpipe.host import bandwidth


def test_a_plausible_number() -> None:
    # from a single slow core to a large server, whatever else runs here
    assert 0.3 < bandwidth.read_bandwidth_gb_s(1, nbytes=128 << 20) < 5000


def test_no_threads() -> None:
    with pytest.raises(UsageError):
        bandwidth.read_bandwidth_gb_s(0)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The calls of the measurement, which returns 40, 41, …"""
    calls: list[int] = []

    def measure(threads: int) -> float:
        calls.append(threads)
        return 39.0 + len(calls)

    monkeypatch.setattr(bandwidth, "read_bandwidth_gb_s", measure)
    return calls


def test_measured_once_per_boot_and_thread_count(tmp_path: Path, measured: list[int]) -> None:
    cache = tmp_path / "cache"
    assert [bandwidth.cached_read_bandwidth_gb_s(2, cache) for _ in range(3)] == [40, 40, 40]
    assert bandwidth.cached_read_bandwidth_gb_s(1, cache) == 41
    assert bandwidth.cached_read_bandwidth_gb_s(2, cache) == 40
    path = cache / "bandwidth.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"boot": "another"}))
    assert bandwidth.cached_read_bandwidth_gb_s(2, cache) == 42
    assert measured == [2, 1, 2]


def test_a_value_from_a_busy_moment_is_replaced(tmp_path: Path, measured: list[int]) -> None:
    assert bandwidth.cached_read_bandwidth_gb_s(2, tmp_path) == 40
    assert bandwidth.cached_read_bandwidth_gb_s(2, tmp_path, seen_gb_s=40.5) == 41
    assert bandwidth.cached_read_bandwidth_gb_s(2, tmp_path, seen_gb_s=40.5) == 41


@pytest.mark.parametrize("content", ["", "[]", "{", '{"boot": 1}', '{"boot": "x", "read_gb_s": []}', "\0"])
def test_a_broken_cache_is_measured_anew(tmp_path: Path, measured: list[int], content: str) -> None:
    (tmp_path / "bandwidth.json").write_text(content)
    assert bandwidth.cached_read_bandwidth_gb_s(2, tmp_path) == 40


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, measured: list[int]) -> None:
    (tmp_path / "file").write_text("")
    assert bandwidth.cached_read_bandwidth_gb_s(2, tmp_path / "file" / "cache") == 40
