from __future__ import annotations

import builtins
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlcpipe.checkpoint import hub as hub_module
from mlcpipe.checkpoint import open_checkpoint, transfer
from mlcpipe.checkpoint.hub import parse_spec, resolve
from mlcpipe.checkpoint.transfer import RemoteFile, fetch_file
from mlcpipe.errors import CheckpointError, DownloadError, MlcpipeError, ResourceError
from mlcpipe.progress import SilentProgress
from tests.checkpoint.helpers import numbers, write_checkpoint

huggingface_hub = pytest.importorskip("huggingface_hub")
pytest.importorskip("huggingface_hub.constants")
from tests.checkpoint.hub_server import COMMIT, Hub, etag, serve

SPEC = "hf://org/tiny-model"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


class Recorded(SilentProgress):
    """Remembers the reports."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.total = 0
        self.done = 0

    def stage(self, name: str) -> None:
        self.stages.append(name)

    def bytes_total(self, n: int) -> None:
        self.total += n

    def advance(self, n: int) -> None:
        self.done += n


@pytest.fixture(autouse=True)
def plain_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No proxy, no token and no waiting, whatever the machine has."""
    for name in (
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "ALL_PROXY",
        "http_proxy",
        "https_proxy",
        "all_proxy",
        "HF_TOKEN",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", True)
    monkeypatch.setattr(transfer.time, "sleep", lambda seconds: None)
    huggingface_hub.close_session()
    yield
    huggingface_hub.close_session()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    tensors = {SHARDS[0]: {"a": numbers(300, 1000)}, SHARDS[1]: {"b": numbers(200, 1000, seed=1)}}
    folder = write_checkpoint(tmp_path / "source", tensors)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "generation_config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("")
    (folder / "README.md").write_text("# read me")
    (folder / "modeling_tiny.py").write_text("raise SystemExit")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    with serve(Hub({file.name: file.read_bytes() for file in folder.iterdir()})) as server:
        yield server


def fetch(hub: Hub, tmp_path: Path, spec: str = SPEC, progress: SilentProgress | None = None) -> Path:
    return resolve(spec, progress or SilentProgress(), cache_dir=tmp_path / "cache", endpoint=hub.endpoint)


def refused(hub: Hub, tmp_path: Path, message: str, kind: type[MlcpipeError] = DownloadError) -> None:
    with pytest.raises(kind, match=message) as caught:
        fetch(hub, tmp_path)
    line = str(caught.value)
    assert "\n" not in line and len(line) < 700


def remote(hub: Hub, name: str) -> RemoteFile:
    content = hub.files[name]
    url = huggingface_hub.hf_hub_url(hub.repo, name, revision=COMMIT, endpoint=hub.endpoint)
    return RemoteFile(name, url, len(content), etag(name, content))


# Whole downloads


def test_a_whole_download(hub: Hub, tmp_path: Path) -> None:
    progress = Recorded()
    folder = fetch(hub, tmp_path, progress=progress)
    wanted = set(hub.files) - {"README.md", "modeling_tiny.py", "pytorch_model.bin"}
    assert {file.name for file in folder.iterdir()} == wanted
    for name in wanted:
        assert (folder / name).read_bytes() == hub.files[name]
        assert hub.gets(name) == ([None] if hub.files[name] else [])  # nothing to ask for in an empty file
    np.testing.assert_array_equal(open_checkpoint(folder).read("b"), numbers(200, 1000, seed=1))
    assert progress.total == progress.done == sum(len(hub.files[name]) for name in wanted)
    assert [stage.split(" of ")[0] for stage in progress.stages] == ["download tokenizer", "download weights"]
    assert not list((tmp_path / "cache").rglob("*partial*"))


def test_a_second_call_downloads_nothing(hub: Hub, tmp_path: Path) -> None:
    first = fetch(hub, tmp_path)
    hub.requests.clear()
    progress = Recorded()
    assert fetch(hub, tmp_path, progress=progress) == first
    assert hub.requests == [("GET", "info", None)]
    assert progress.stages == []


def test_a_blob_without_its_link_is_not_downloaded_again(hub: Hub, tmp_path: Path) -> None:
    link = fetch(hub, tmp_path) / SHARDS[0]
    link.unlink()
    progress = Recorded()
    fetch(hub, tmp_path, progress=progress)
    assert link.read_bytes() == hub.files[SHARDS[0]] and len(hub.gets(SHARDS[0])) == 1
    assert progress.done == progress.total == len(hub.files[SHARDS[0]])


def test_a_single_file(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", {"model.safetensors": {"a": numbers(7)}})
    with serve(Hub({file.name: file.read_bytes() for file in source.iterdir()})) as hub:
        np.testing.assert_array_equal(open_checkpoint(fetch(hub, tmp_path)).read("a"), numbers(7))


@pytest.mark.parametrize("revision", ["v1.0", "refs/pr/1", COMMIT])
def test_a_revision(hub: Hub, tmp_path: Path, revision: str) -> None:
    hub.revision = revision
    assert fetch(hub, tmp_path, f"{SPEC}@{revision}").name == COMMIT


def test_the_cache_is_huggingface_hubs(hub: Hub, tmp_path: Path) -> None:
    """Both ways: what one fetched, the other finds without the network."""
    arguments = {"cache_dir": tmp_path / "cache", "endpoint": hub.endpoint}
    theirs = huggingface_hub.hf_hub_download(hub.repo, SHARDS[0], **arguments)
    folder = fetch(hub, tmp_path)
    assert hub.gets(SHARDS[0]) == [None] and Path(theirs).parent == folder
    found = huggingface_hub.snapshot_download(hub.repo, cache_dir=tmp_path / "cache", local_files_only=True)
    assert Path(found) == folder


@pytest.mark.parametrize("folder", ["models/tiny", Path("models/tiny"), "/models/tiny", "hf:/org/name"])
def test_a_folder_is_taken_as_it_is(folder: str | Path) -> None:
    assert resolve(folder, SilentProgress()) == Path(folder)


# Cut and damaged downloads


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
from mlcpipe.progress import SilentProgress

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
    refused(hub, tmp_path, f"download of '{SHARDS[0]}' does not go on.*HTTP status 503; run the command again")
    assert len(hub.gets(SHARDS[0])) == transfer.FRUITLESS_ATTEMPTS


def test_a_file_that_is_shorter_than_listed(hub: Hub, tmp_path: Path) -> None:
    hub.served[SHARDS[0]] = hub.files[SHARDS[0]][:-10]
    size = len(hub.files[SHARDS[0]])
    refused(hub, tmp_path, f"does not go on.*expected {size} bytes; found {size - 10} bytes")


def test_a_file_that_is_longer_than_listed(hub: Hub, tmp_path: Path) -> None:
    hub.served[SHARDS[0]] = hub.files[SHARDS[0]] + b"more"
    refused(hub, tmp_path, "sent something else.*found more than")
    assert not list((tmp_path / "cache").rglob(SHARDS[0]))


@pytest.mark.parametrize("name", [SHARDS[0], "config.json"])
def test_a_file_with_other_content_is_not_kept(hub: Hub, tmp_path: Path, name: str) -> None:
    hub.served[name] = hub.files[name][:-1] + b"?"
    refused(hub, tmp_path, f"sent something else for '{name}'.*expected .* bytes with hash")
    assert not list((tmp_path / "cache").rglob(name))
    hub.served.clear()
    assert (fetch(hub, tmp_path) / name).read_bytes() == hub.files[name]


def test_a_partial_file_with_other_content_is_not_trusted(hub: Hub, tmp_path: Path) -> None:
    wanted = remote(hub, SHARDS[0])
    blob = tmp_path / wanted.digest
    partial = tmp_path / f"{wanted.digest}.mlcpipe-partial"
    partial.write_bytes(b"not what the hub has")
    with pytest.raises(DownloadError, match="sent something else"):
        fetch_file(wanted, blob, SilentProgress())
    assert not blob.exists()
    partial.write_bytes(bytes(wanted.size + 1))
    fetch_file(wanted, blob, SilentProgress())
    assert blob.read_bytes() == hub.files[SHARDS[0]] and not partial.exists()


def test_two_downloads_of_one_file(hub: Hub, tmp_path: Path) -> None:
    wanted = remote(hub, SHARDS[0])

    class Nested(SilentProgress):
        def advance(self, n: int) -> None:
            with pytest.raises(DownloadError, match="another process downloads"):
                fetch_file(wanted, tmp_path / "blob", SilentProgress())

    fetch_file(wanted, tmp_path / "blob", Nested())
    assert (tmp_path / "blob").read_bytes() == hub.files[SHARDS[0]]


def test_an_empty_file(hub: Hub, tmp_path: Path) -> None:
    fetch_file(remote(hub, "chat_template.jinja"), tmp_path / "blob", SilentProgress())
    assert (tmp_path / "blob").read_bytes() == b""


# What is not there


def test_a_missing_model(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="the hub has no model org/other"):
        fetch(hub, tmp_path, "hf://org/other")


def test_a_missing_revision(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="org/tiny-model has no revision 'v9'"):
        fetch(hub, tmp_path, f"{SPEC}@v9")


def test_a_gated_model(hub: Hub, tmp_path: Path) -> None:
    hub.info_error = (403, "GatedRepo")
    refused(hub, tmp_path, "org/tiny-model@main is gated.*accept its terms")


def test_a_broken_hub(hub: Hub, tmp_path: Path) -> None:
    hub.info_error = (500, "")
    refused(hub, tmp_path, "cannot download hf://org/tiny-model@main.*500")


@pytest.mark.parametrize("name", ["config.json", SHARDS[1]])
def test_a_missing_file(hub: Hub, tmp_path: Path, name: str) -> None:
    del hub.files[name]
    refused(hub, tmp_path, f"hf://org/tiny-model@main lacks '{name}'")


def test_a_file_that_is_listed_and_absent(hub: Hub, tmp_path: Path) -> None:
    hub.info_body = hub.info()
    del hub.files[SHARDS[1]]
    refused(hub, tmp_path, "cannot download hf://org/tiny-model@main.*404")


def test_a_model_with_pickles_only(hub: Hub, tmp_path: Path) -> None:
    del hub.files["model.safetensors.index.json"]
    refused(hub, tmp_path, "has no safetensors.*pickled weights")
    assert hub.requests == [("GET", "info", None)]


def test_an_index_that_points_elsewhere(hub: Hub, tmp_path: Path) -> None:
    hub.files["model.safetensors.index.json"] = json.dumps({"weight_map": {"a": "../x.safetensors"}}).encode()
    refused(hub, tmp_path, "the index names a shard that is not allowed", CheckpointError)


@pytest.mark.parametrize(
    "change",
    [
        {"sha": "../../x"},
        {"sha": None},
        {"siblings": [{"rfilename": "config.json"}, {"rfilename": "model.safetensors"}]},
        {"siblings": [{"size": 1}]},
        {"siblings": [{"rfilename": n, "size": 2} for n in ("config.json", "model.safetensors")]},
        {"siblings": [{"rfilename": n, "size": 2, "blobId": "../x"} for n in ("config.json", "model.safetensors")]},
        {"siblings": [{"rfilename": n, "size": -2, "blobId": "0" * 40} for n in ("config.json", "model.safetensors")]},
        {"siblings": [{"rfilename": n, "size": "2", "blobId": "0" * 40} for n in ("config.json", "model.safetensors")]},
    ],
)
def test_odd_answers(hub: Hub, tmp_path: Path, change: dict[str, Any]) -> None:
    hub.info_body = json.dumps({**json.loads(hub.info()), **change}).encode()
    refused(hub, tmp_path, "odd answer")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b"7"])
def test_answers_that_are_no_listing(hub: Hub, tmp_path: Path, body: bytes) -> None:
    hub.info_body = body
    refused(hub, tmp_path, "odd answer|cannot download")


# Without a network, a disk or the package


def test_a_hub_that_cannot_be_reached(hub: Hub, tmp_path: Path) -> None:
    hub.endpoint = "http://127.0.0.1:1"
    refused(hub, tmp_path, "the hub cannot be reached for hf://org/tiny-model@main")


def test_a_complete_copy_serves_without_a_hub(hub: Hub, tmp_path: Path) -> None:
    folder = fetch(hub, tmp_path)
    hub.endpoint = "http://127.0.0.1:1"
    progress = Recorded()
    assert fetch(hub, tmp_path, progress=progress) == folder
    assert fetch(hub, tmp_path, f"{SPEC}@{COMMIT}") == folder
    assert progress.stages == ["hub not reachable, using the copy of hf://org/tiny-model@main"]
    with pytest.raises(DownloadError, match="cannot be reached"):
        fetch(hub, tmp_path, f"{SPEC}@v2")
    (folder / SHARDS[1]).unlink()
    refused(hub, tmp_path, "cannot be reached")


@pytest.mark.parametrize("lost", ["config.json", "model.safetensors.index.json", SHARDS[0]])
def test_an_incomplete_copy_does_not_serve(hub: Hub, tmp_path: Path, lost: str) -> None:
    (fetch(hub, tmp_path) / lost).unlink()
    hub.endpoint = "http://127.0.0.1:1"
    refused(hub, tmp_path, "cannot be reached")


@pytest.mark.parametrize("reference", ["../../elsewhere", "", "\xff"])
def test_a_reference_that_is_no_commit_does_not_serve(hub: Hub, tmp_path: Path, reference: str) -> None:
    folder = fetch(hub, tmp_path)
    shutil.copytree(folder, tmp_path / "cache" / "elsewhere")
    (folder.parents[1] / "refs" / "main").write_bytes(reference.encode("latin-1"))
    hub.endpoint = "http://127.0.0.1:1"
    refused(hub, tmp_path, "cannot be reached")


def test_a_complete_copy_of_a_single_file_serves(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", {"model.safetensors": {"a": numbers(7)}})
    with serve(Hub({file.name: file.read_bytes() for file in source.iterdir()})) as hub:
        folder = fetch(hub, tmp_path)
        hub.endpoint = "http://127.0.0.1:1"
        assert fetch(hub, tmp_path) == folder


def test_offline_mode(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fetch(hub, tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    hub.requests.clear()
    assert fetch(hub, tmp_path) == folder
    assert hub.requests == []


def test_a_disk_too_small_is_seen_before_the_weights_come(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(folder: Path, needed: int) -> None:
        if needed > 1_000_000:
            raise ResourceError(f"{needed}")

    monkeypatch.setattr(hub_module, "check_disk_space", check)
    weights = sum(len(hub.files[name]) for name in SHARDS)
    refused(hub, tmp_path, f"^{weights}$", ResourceError)
    assert hub.gets(SHARDS[0]) == []
    blobs = tmp_path / "cache" / "models--org--tiny-model" / "blobs"
    (blobs / f"{etag(SHARDS[0], hub.files[SHARDS[0]])}.mlcpipe-partial").write_bytes(bytes(1000))
    refused(hub, tmp_path, f"^{weights - 1000}$", ResourceError)


def test_a_disk_that_gets_full(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(transfer._Partial, "append", full)
    refused(hub, tmp_path, "the disk is full while downloading", ResourceError)


def test_a_cache_that_cannot_be_written(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    refused(hub, tmp_path, "cannot store hf://org/tiny-model@main")


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def absent(name: str, *rest: Any, **more: Any) -> Any:
        if name.partition(".")[0] == "huggingface_hub":
            raise ImportError(name)
        return original(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(DownloadError, match=r"pip install 'mlcpipe\[hub\]'"):
        resolve(SPEC, SilentProgress(), cache_dir=tmp_path)


def test_importing_the_module_does_not_import_the_package() -> None:
    code = "import sys, mlcpipe.checkpoint; sys.exit('huggingface_hub' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


# Names


def test_names() -> None:
    assert str(parse_spec("hf://Qwen/Qwen2.5-0.5B")) == "hf://Qwen/Qwen2.5-0.5B@main"
    model = parse_spec("hf://a_b/c.d-e_f@refs/pr/3")
    assert (model.repo, model.revision) == ("a_b/c.d-e_f", "refs/pr/3")


@pytest.mark.parametrize(
    "spec",
    [
        "hf://",
        "hf://name",
        "hf:///name",
        "hf://org/",
        "hf://org/name/more",
        "hf://../name",
        "hf://org/..",
        "hf://org/a..b",
        "hf://org/a--b",
        "hf://org/-a",
        "hf://org/a.",
        "hf://org/a b",
        "hf://org/a\n",
        "hf://org/n\u00e4me",
        "hf://org/" + "a" * 97,
        "hf://org/name@",
        "hf://org/name@..",
        "hf://org/name@../x",
        "hf://org/name@a/../b",
        "hf://org/name@a..b",
        "hf://org/name@/x",
        "hf://org/name@a/",
        "hf://org/name@a//b",
        "hf://org/name@-x",
        "hf://org/name@a?b",
        "hf://org/name@" + "a" * 256,
        "hf://user:secret@host/org/name",
    ],
)
def test_bad_names(spec: str) -> None:
    with pytest.raises(DownloadError, match="bad model name.*expected hf://org/name"):
        resolve(spec, SilentProgress())
