"""Downloads of weights by the Android library, from a server that fails."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlcpipe.web.site import Site
from tests.e2e.web.faulty_server import Faults
from tests.native.android.conftest import Scenario
from tests.native.downloads import NAME, PART, PARTS, Host, hosted

pytestmark = pytest.mark.full  # compiles Kotlin


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    with hosted(tmp_path) as host:
        yield host


def download(host: Host, scenario: Scenario, *, end: int = -1) -> list[dict[str, Any]]:
    return scenario("download", host.json, host.app, host.url, end)


def test_a_file_comes_whole_and_once(host: Host, scenario: Scenario) -> None:
    done, said = download(host, scenario)
    assert done["code"] is None and said["there"] and host.is_whole()
    assert said["progress"] == [*range(PART, PART * PARTS, PART), len(host.content)]
    assert download(host, scenario)[1]["progress"] == [] and len(host.server.seen) == 1


def test_a_download_goes_on_in_another_process(host: Host, scenario: Scenario) -> None:
    assert download(host, scenario, end=3 * PART) == []  # the process ended
    assert not (host.app / NAME).exists()
    _, said = download(host, scenario)
    assert host.ranges() == [None, f"bytes={3 * PART}-"] and host.is_whole()
    assert said["progress"][:3] == [PART, 2 * PART, 3 * PART]


def test_what_was_kept_is_checked(host: Host, scenario: Scenario) -> None:
    """Also what is longer than the file."""
    host.app.mkdir()
    kept = bytearray(host.content + b"more")
    kept[PART + 5] ^= 1
    (host.app / f"{NAME}.part").write_bytes(kept)
    download(host, scenario)
    assert host.ranges() == [f"bytes={PART}-"] and host.is_whole()


@pytest.mark.parametrize(
    "faults",
    [
        Faults(breakAfter={NAME: int(2.5 * PART)}, times=2),
        Faults(flip={NAME: 3 * PART + 1}, times=1),
        Faults(breakAfter={NAME: 2 * PART}, times=1, noRanges=True),
    ],
    ids=["breaks", "damage", "breaks, without ranges"],
)
def test_a_fault_costs_its_part(host: Host, scenario: Scenario, faults: Faults) -> None:
    host.server.change(faults)
    done, said = download(host, scenario)
    assert done["code"] is None and host.is_whole(), done
    assert said["progress"] == sorted(set(said["progress"])) and len(host.ranges()) > 1


@pytest.mark.parametrize(
    ("faults", "code", "words"),
    [
        (Faults(status={NAME: 404}), "NETWORK", "404"),
        (Faults(status={NAME: 503}), "NETWORK", "503"),
        (Faults(dead=True), "NETWORK", "failed"),
        (Faults(flip={NAME: 5}), "BUNDLE", "another file"),
    ],
)
def test_a_host_that_has_no_such_file(host: Host, scenario: Scenario, faults: Faults, code: str, words: str) -> None:
    host.server.change(faults)
    done, said = download(host, scenario)
    assert done["code"] == code and words in done["line"] and not said["there"]
    host.server.change(Faults())
    download(host, scenario)
    assert host.is_whole()


def test_a_file_that_changed_on_the_host_is_not_mixed(host: Host, scenario: Scenario) -> None:
    download(host, scenario, end=2 * PART)
    changed = bytes(reversed(host.content))
    host.server.site = Site({NAME: changed})
    done, said = download(host, scenario)
    assert done["code"] == "BUNDLE" and not said["there"]


def test_a_download_is_cancelled(host: Host, scenario: Scenario) -> None:
    cancelled, done, _ = scenario("cancelDownload", host.json, host.app, host.url)
    assert cancelled == {"cancelled": True, "there": False} and done["code"] is None and host.is_whole()


def test_two_downloads_of_a_file_do_not_mix(host: Host, scenario: Scenario) -> None:
    twice, file = scenario("downloadTwice", host.json, host.app, host.url)
    assert twice["code"] == "USAGE" and "is running" in twice["line"]
    assert file["code"] == "USAGE" and "http" in file["line"]


def test_a_session_shows_its_download(host: Host, scenario: Scenario) -> None:
    """Of a file that is no model."""
    download(host, scenario, end=3 * PART)
    states, opened, absent = scenario("fetched", host.json, host.app, host.url)
    assert states["states"] == ["Absent", "Verifying", "Downloading", "Dropped", "Loading", "Failed BUNDLE"]
    assert opened["code"] == absent["code"] == "BUNDLE" and "absent" in absent["line"]


def test_a_list_of_parts_that_is_damaged(host: Host, scenario: Scenario) -> None:
    good = json.loads(host.json.read_text())
    for wrong in ({"name": "../x"}, {"bytes": 1}, {"part_bytes": 0}, {"sha256": [1] * PARTS}):
        host.json.write_text(json.dumps(good | wrong))
        with pytest.raises(AssertionError, match="parts is damaged"):
            download(host, scenario)
