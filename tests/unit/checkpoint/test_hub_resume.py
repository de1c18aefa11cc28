"""Downloads that were cut or damaged resume, or are refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mlcpipe.checkpoint import transfer
from mlcpipe.checkpoint.transfer import fetch_file
from mlcpipe.errors import DownloadError
from mlcpipe.support.progress import SilentProgress
from tests.unit.checkpoint.helpers import SHARDS, numbers, write_checkpoint

huggingface_hub = pytest.importorskip("huggingface_hub")
from tests.unit.checkpoint.hub_cases import Recorded, fetch, refused, remote
from tests.unit.checkpoint.hub_server import Hub, serve

pytestmark = pytest.mark.usefixtures("plain_network")


def test_a_cut_connection_is_resumed_with_a_range(hub: Hub, tmp_path: Path) -> None:
    hub.cut_after[SHARDS[0]] = [2**20, 1000]
    progress = Recorded()
    folder = fetch(hub, tmp_path, progress=progress)
    assert (folder / SHARDS[0]).read_bytes() == hub.files[SHARDS[0]]
    ranges = hub.gets(SHARDS[0])
    assert ranges[0] is None and ranges[1] == f"bytes={2**20}-" and len(ranges) >= 3
    assert progress.done == progress.total


CHILD = """
import sys
from pathlib import Path
from mlcpipe.checkpoint.hub import resolve
from mlcpipe.support.progress import SilentProgress

class Killed(SilentProgress):
    done = 0
    def advance(self, n):
        self.done += n
        if self.done > int(sys.argv[3]):
            import os, signal
            os.kill(os.getpid(), signal.SIGKILL)

resolve("hf://org/tiny-model", Killed(), cache_dir=Path(sys.argv[1]), endpoint=sys.argv[2])
"""


def test_a_killed_process_is_resumed_by_the_next(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", {"model.safetensors": {"a": numbers(1500, 1000)}})
    with serve(Hub({file.name: file.read_bytes() for file in source.iterdir()})) as hub:
        command = [sys.executable, "-c", CHILD, str(tmp_path / "cache"), hub.endpoint, str(3 << 20)]
        environment = {**os.environ, "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}
        child = subprocess.run(command, capture_output=True, timeout=120, env=environment)
        assert child.returncode == -signal.SIGKILL, child.stderr.decode()
        folder = fetch(hub, tmp_path)
        resumed = hub.gets("model.safetensors")[1]
        assert resumed is not None and int(resumed.removeprefix("bytes=")[:-1]) >= 2 << 20
        assert (folder / "model.safetensors").read_bytes() == hub.files["model.safetensors"]


def test_an_interrupt_keeps_what_came(hub: Hub, tmp_path: Path) -> None:
    class Stopped(Recorded):
        def advance(self, n: int) -> None:
            super().advance(n)
            if self.done > 2**20:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(hub, tmp_path, progress=Stopped())
    progress = Recorded()
    folder = fetch(hub, tmp_path, progress=progress)
    assert hub.gets(SHARDS[0])[-1] == f"bytes={2**20}-"
    assert (folder / SHARDS[0]).read_bytes() == hub.files[SHARDS[0]]
    assert progress.done == progress.total


@pytest.mark.parametrize("fault", ["without_ranges", "shifted_ranges"])
def test_a_server_without_proper_ranges_costs_a_new_beginning(hub: Hub, tmp_path: Path, fault: str) -> None:
    setattr(hub, fault, True)
    hub.cut_after[SHARDS[0]] = [2**20]
    progress = Recorded()
    folder = fetch(hub, tmp_path, progress=progress)
    assert (folder / SHARDS[0]).read_bytes() == hub.files[SHARDS[0]]
    assert progress.done == progress.total


def test_a_range_that_the_server_refuses_costs_a_new_beginning(hub: Hub, tmp_path: Path) -> None:
    hub.cut_after[SHARDS[0]] = [2**20]
    hub.statuses[SHARDS[0]] = [0, 416]
    progress = Recorded()
    folder = fetch(hub, tmp_path, progress=progress)
    assert (folder / SHARDS[0]).read_bytes() == hub.files[SHARDS[0]]
    assert hub.gets(SHARDS[0]) == [None, f"bytes={2**20}-", None]
    assert progress.done == progress.total


def test_a_busy_server_is_asked_again(hub: Hub, tmp_path: Path) -> None:
    hub.statuses[SHARDS[0]] = [503, 429]
    assert (fetch(hub, tmp_path) / SHARDS[0]).exists()
    assert len(hub.gets(SHARDS[0])) == 3


def test_a_server_that_stays_busy(hub: Hub, tmp_path: Path) -> None:
    hub.statuses[SHARDS[0]] = [503] * 100
    refused(hub, tmp_path, f"download of '{SHARDS[0]}' stalled.*HTTP status 503; run the command again")
    assert len(hub.gets(SHARDS[0])) == transfer.MAX_FRUITLESS_ATTEMPTS


def test_a_file_that_is_shorter_than_listed(hub: Hub, tmp_path: Path) -> None:
    hub.served[SHARDS[0]] = hub.files[SHARDS[0]][:-10]
    size = len(hub.files[SHARDS[0]])
    refused(hub, tmp_path, f"stalled.*expected {size} bytes; found {size - 10} bytes")


def test_a_file_that_is_longer_than_listed(hub: Hub, tmp_path: Path) -> None:
    hub.served[SHARDS[0]] = hub.files[SHARDS[0]] + b"more"
    refused(hub, tmp_path, "sent different content.*found more than")
    assert not list((tmp_path / "cache").rglob(SHARDS[0]))


@pytest.mark.parametrize("name", [SHARDS[0], "config.json"])
def test_a_file_with_other_content_is_not_kept(hub: Hub, tmp_path: Path, name: str) -> None:
    hub.served[name] = hub.files[name][:-1] + b"?"
    refused(hub, tmp_path, f"sent different content for '{name}'.*expected .* bytes with hash")
    assert not list((tmp_path / "cache").rglob(name))
    hub.served.clear()
    assert (fetch(hub, tmp_path) / name).read_bytes() == hub.files[name]


def test_a_partial_file_with_other_content_is_not_trusted(hub: Hub, tmp_path: Path) -> None:
    wanted = remote(hub, SHARDS[0])
    blob = tmp_path / wanted.digest
    partial = tmp_path / f"{wanted.digest}.mlcpipe-partial"
    partial.write_bytes(b"not what the hub has")
    with pytest.raises(DownloadError, match="sent different content"):
        fetch_file(wanted, blob, SilentProgress())
    assert not blob.exists()
    partial.write_bytes(bytes(wanted.size + 1))
    fetch_file(wanted, blob, SilentProgress())
    assert blob.read_bytes() == hub.files[SHARDS[0]] and not partial.exists()


def test_two_downloads_of_one_file(hub: Hub, tmp_path: Path) -> None:
    wanted = remote(hub, SHARDS[0])

    class Nested(SilentProgress):
        def advance(self, n: int) -> None:
            with pytest.raises(DownloadError, match="another process is downloading"):
                fetch_file(wanted, tmp_path / "blob", SilentProgress())

    fetch_file(wanted, tmp_path / "blob", Nested())
    assert (tmp_path / "blob").read_bytes() == hub.files[SHARDS[0]]


def test_an_empty_file(hub: Hub, tmp_path: Path) -> None:
    fetch_file(remote(hub, "chat_template.jinja"), tmp_path / "blob", SilentProgress())
    assert (tmp_path / "blob").read_bytes() == b""
