"""Downloads of weights by the Swift package, from a server that fails."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mlcpipe.web.site import Site
from tests.e2e.web.faulty_server import Faults
from tests.native.downloads import NAME, PART, PARTS, Host, hosted
from tests.swift.swift import WORK, swift

pytestmark = pytest.mark.everything  # builds the package

USAGE, BUNDLE, RESOURCE, NETWORK = 1, 5, 6, 11
RANGES = [f"bytes={part * PART}-{part * PART + PART - 1}" for part in range(PARTS - 1)]
Download = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def host(built: Path) -> Iterator[Host]:
    with tempfile.TemporaryDirectory(dir=built) as folder, hosted(Path(folder)) as host:
        yield host


@pytest.fixture
def download(built: Path, host: Host) -> Download:
    """Runs Download of tests/swift/package in a process of its own: the lines that it prints."""

    def run(*words: object) -> list[dict[str, Any]]:
        places = [f"{WORK}/{path.relative_to(built)}" for path in (host.json, host.app)]
        said = swift(built, f"{WORK}/tests/.build/debug/Download", *places, host.url, *words)
        return [json.loads(line) for line in said.splitlines()]

    return run


def test_a_file_comes_whole_and_once(host: Host, download: Download) -> None:
    (done,) = download()
    assert done["code"] == 0 and done["there"] and done["verified"] and host.is_whole()
    assert done["progress"] == sorted(done["progress"]) and done["progress"][-1] == len(host.content)
    assert len(host.ranges()) == PARTS and set(RANGES) < set(host.ranges())
    assert download()[0]["progress"] == [] and len(host.ranges()) == PARTS


def test_a_download_goes_on_in_another_process(host: Host, download: Download) -> None:
    assert download(3 * PART) == []  # the process ended
    assert not (host.app / NAME).exists()
    before = len(host.ranges())
    (done,) = download()
    assert done["progress"][0] >= 3 * PART and host.is_whole()
    assert len(host.ranges()) - before <= PARTS - 3


def test_what_came_while_no_process_ran_is_used(host: Host, download: Download) -> None:
    """As of a background session: a part that is right, one that is wrong, and one that is too long."""
    host.app.mkdir()
    parts = {1: host.content[PART : 2 * PART], 2: bytes(PART), 3: host.content[3 * PART : 5 * PART]}
    for part, content in parts.items():
        (host.app / f"{NAME}.part{part}").write_bytes(content)
    download()
    assert {RANGES[0], RANGES[2], RANGES[4]} <= set(host.ranges()) and host.is_whole()
    assert not {RANGES[1], RANGES[3]} & set(host.ranges())


def test_what_was_kept_is_checked(host: Host, download: Download) -> None:
    """Also what is longer than the file."""
    host.app.mkdir()
    kept = bytearray(host.content + b"more")
    kept[PART + 5] ^= 1
    (host.app / f"{NAME}.part").write_bytes(kept)
    download()
    assert host.ranges() == RANGES[1:2] and host.is_whole()


@pytest.mark.parametrize(
    "faults",
    [
        Faults(breakAfter={NAME: PART // 2}, times=2),
        Faults(flip={NAME: 3 * PART + 1}, times=PARTS),
        Faults(noRanges=True),
        Faults(breakAfter={NAME: 2 * PART}, times=1, noRanges=True),
    ],
    ids=["breaks", "damage", "without ranges", "breaks, without ranges"],
)
def test_a_fault_costs_its_part(host: Host, download: Download, faults: Faults) -> None:
    host.server.change(faults)
    (done,) = download()
    assert done["code"] == 0 and host.is_whole(), done
    assert done["progress"] == sorted(set(done["progress"]))
    assert len(host.ranges()) == (1 if faults.times > PARTS else len(host.ranges()))


@pytest.mark.parametrize(
    ("faults", "code", "words"),
    [
        (Faults(status={NAME: 404}), NETWORK, "404"),
        (Faults(status={NAME: 503}), NETWORK, "failed"),
        (Faults(dead=True), NETWORK, "failed"),
        (Faults(flip={NAME: 5}), BUNDLE, "another file"),
    ],
)
def test_a_host_that_has_no_such_file(host: Host, download: Download, faults: Faults, code: int, words: str) -> None:
    host.server.change(faults)
    (done,) = download()
    assert done["code"] == code and words in done["line"] and not done["there"]
    host.server.change(Faults())
    download()
    assert host.is_whole()


def test_a_file_that_changed_on_the_host_is_not_mixed(host: Host, download: Download) -> None:
    download(2 * PART)
    host.server.site = Site({NAME: bytes(reversed(host.content))})
    (done,) = download()
    assert done["code"] == BUNDLE and not done["there"]


def test_a_download_is_cancelled(host: Host, download: Download) -> None:
    host.server.change(Faults(slow={NAME: 100}))
    cancelled, done = download("cancel")
    assert cancelled["cancelled"] and not cancelled["there"] and done["code"] == 0 and host.is_whole()
    assert done["progress"][0] >= PART


def test_a_disk_without_room(host: Host, download: Download) -> None:
    good = json.loads(host.json.read_text())
    host.json.write_text(json.dumps(good | {"bytes": PARTS << 50, "part_bytes": 1 << 50}))
    (done,) = download()
    assert done["code"] == RESOURCE and "no room" in done["line"] and host.ranges() == []


def test_a_list_of_parts_that_is_damaged(host: Host, download: Download) -> None:
    good = json.loads(host.json.read_text())
    for wrong in ({"name": "../x"}, {"bytes": 1}, {"part_bytes": 0}, {"bytes": -1}, {"sha256": [1] * PARTS}):
        host.json.write_text(json.dumps(good | wrong))
        with pytest.raises(AssertionError, match="parts is damaged"):
            download()
