"""What a hub does not have, and what works without a network, a disk or the package."""

from __future__ import annotations

import builtins
import errno
import gzip
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlcpipe.checkpoint import hub as hub_module
from mlcpipe.checkpoint import transfer
from mlcpipe.checkpoint.hub import resolve
from mlcpipe.errors import CheckpointError, DownloadError, ResourceError
from mlcpipe.support.progress import SilentProgress
from tests.unit.checkpoint.helpers import SHARDS, numbers, write_checkpoint

huggingface_hub = pytest.importorskip("huggingface_hub")
from tests.unit.checkpoint.hub_cases import SPEC, Recorded, fetch, refused
from tests.unit.checkpoint.hub_server import COMMIT, Hub, etag, serve

pytestmark = pytest.mark.usefixtures("plain_network")


def test_a_missing_model(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="the hub has no model org/other"):
        fetch(hub, tmp_path, "hf://org/other")


def test_a_missing_revision(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="org/tiny-model has no revision 'v9'"):
        fetch(hub, tmp_path, f"{SPEC}@v9")


def test_a_gated_model(hub: Hub, tmp_path: Path) -> None:
    hub.info_error = (403, "GatedRepo")
    refused(hub, tmp_path, "org/tiny-model@main is gated.*accept the terms")


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
        {"siblings": [{"rfilename": n, "lfs": [2]} for n in ("config.json", "model.safetensors")]},
        {"siblings": [{"rfilename": n, "lfs": {"size": 2}} for n in ("config.json", "model.safetensors")]},
        {"siblings": [7]},
        {"siblings": {"rfilename": 7}},
        {"siblings": "config.json"},
        {"sha": 7},
    ],
)
def test_invalid_responses(hub: Hub, tmp_path: Path, change: dict[str, Any]) -> None:
    hub.info_body = json.dumps({**json.loads(hub.info()), **change}).encode()
    refused(hub, tmp_path, "invalid response")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b"[]",
        b"7",
        b"[" * 200_000,
        b'{"a":' * 200_000,
        b"[" + b"1," * 1_000_000 + b"1]",
        b"\xff",
        b"1" * 9999,
    ],
)
def test_answers_that_are_no_listing(hub: Hub, tmp_path: Path, body: bytes) -> None:
    hub.info_body = body
    refused(hub, tmp_path, "invalid response from the hub for hf://org/tiny-model@main.*check HF_ENDPOINT")


def pieces(begin: str, body: bytes | None) -> Iterator[bytes]:
    """An answer whose body comes 4000 times, or a header line at a time in ten seconds."""
    yield f"HTTP/1.1 {begin}\r\n".encode()
    for _ in range(4000 if body else 100):
        threading.Event().wait(0 if body else 0.1)
        yield body or b"X: 1\r\n"


@pytest.mark.parametrize(
    ("begin", "body", "words"),
    [
        ("200 OK\r\n", bytes(1 << 16), "invalid response.*more than 1048576 bytes"),
        ("200 OK\r\nContent-Encoding: gzip\r\n", gzip.compress(bytes(8 << 20)), "more than 1048576 bytes"),
        ("200 OK\r\n", None, "cannot reach the hub.*no whole answer in 0.5 s"),
        ("200 OK", None, "cannot reach the hub.*no whole answer in 0.5 s"),
        ("404 No\r\nX-Error-Code: RepoNotFound\r\n", bytes(1 << 16), "the hub has no model org/tiny-model"),
        ("500 No\r\n", b"[" * (1 << 16), "cannot download.*500"),
        ("307 No\r\nLocation: /org/other\r\n", bytes(1 << 16), "the hub has no model org/tiny-model"),
    ],
)
def test_answers_without_end(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begin: str, body: bytes | None, words: str
) -> None:
    """Nothing is read to its end, whatever the hub says that it is."""
    monkeypatch.setattr(hub_module, "MAX_LISTING_BYTES", 1 << 20)
    if body is None:
        monkeypatch.setattr(hub_module, "MAX_LISTING_S", 0.5)
    hub.info_raw = pieces(begin, body)
    refused(hub, tmp_path, words)
    assert hub.sent < 1000


def test_redirects_that_lead_nowhere(hub: Hub, tmp_path: Path) -> None:
    hub.info_raw = [
        b"HTTP/1.1 307 No\r\nLocation: /api/models/org/tiny-model/revision/main\r\nContent-Length: 0\r\n\r\n"
    ]
    refused(hub, tmp_path, "more than 10 redirects")
    assert hub.requests == [("GET", "info", None)] * 10


def test_a_hub_that_cannot_be_reached(hub: Hub, tmp_path: Path) -> None:
    hub.endpoint = "http://127.0.0.1:1"
    refused(hub, tmp_path, "cannot reach the hub for hf://org/tiny-model@main")


def test_a_complete_copy_serves_without_a_hub(hub: Hub, tmp_path: Path) -> None:
    folder = fetch(hub, tmp_path)
    hub.endpoint = "http://127.0.0.1:1"
    progress = Recorded()
    assert fetch(hub, tmp_path, progress=progress) == folder
    assert fetch(hub, tmp_path, f"{SPEC}@{COMMIT}") == folder
    assert progress.stages == ["cannot reach the hub, using the cached copy of hf://org/tiny-model@main"]
    with pytest.raises(DownloadError, match="cannot reach the hub"):
        fetch(hub, tmp_path, f"{SPEC}@v2")
    (folder / SHARDS[1]).unlink()
    refused(hub, tmp_path, "cannot reach the hub")


@pytest.mark.parametrize("lost", ["config.json", "model.safetensors.index.json", SHARDS[0]])
def test_an_incomplete_copy_does_not_serve(hub: Hub, tmp_path: Path, lost: str) -> None:
    (fetch(hub, tmp_path) / lost).unlink()
    hub.endpoint = "http://127.0.0.1:1"
    refused(hub, tmp_path, "cannot reach the hub")


@pytest.mark.parametrize("reference", ["../../elsewhere", "", "\xff"])
def test_a_reference_that_is_no_commit_does_not_serve(hub: Hub, tmp_path: Path, reference: str) -> None:
    folder = fetch(hub, tmp_path)
    shutil.copytree(folder, tmp_path / "cache" / "elsewhere")
    (folder.parents[1] / "refs" / "main").write_bytes(reference.encode("latin-1"))
    hub.endpoint = "http://127.0.0.1:1"
    refused(hub, tmp_path, "cannot reach the hub")


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
