"""Whole downloads, and names of models."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from mlcpipe.checkpoint import open_checkpoint
from mlcpipe.checkpoint.hub import parse_spec, resolve
from mlcpipe.errors import DownloadError
from mlcpipe.support.progress import SilentProgress
from tests.unit.checkpoint.helpers import SHARDS, numbers, write_checkpoint

huggingface_hub = pytest.importorskip("huggingface_hub")
from tests.unit.checkpoint.hub_cases import SPEC, Recorded, fetch, refused
from tests.unit.checkpoint.hub_server import COMMIT, Hub, serve

pytestmark = pytest.mark.usefixtures("plain_network")


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


def test_more_templates_are_fetched(hub: Hub, tmp_path: Path) -> None:
    names = ("tool_use.jinja", "..jinja", "a/b.jinja", "README.md")
    hub.files |= {f"additional_chat_templates/{name}": b"tools" for name in names}
    folder = fetch(hub, tmp_path) / "additional_chat_templates"
    assert [(path.name, path.read_bytes()) for path in folder.iterdir()] == [("tool_use.jinja", b"tools")]


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


@pytest.mark.parametrize("name", [SHARDS[0], "tokenizer.json"])
def test_what_is_not_the_listed_file_does_not_reach_the_snapshot(hub: Hub, tmp_path: Path, name: str) -> None:
    """Whoever answers for the content names it too: only the list counts."""
    hub.named[name] = hub.files[name][:-1] + b"?"
    refused(hub, tmp_path, f"sent different content for '{name}'")
    # another program's download, which believes the name
    huggingface_hub.hf_hub_download(hub.repo, name, cache_dir=tmp_path / "cache", endpoint=hub.endpoint)
    refused(hub, tmp_path, f"the cache's '{name}' is not the hub's.*; delete it")


def test_names_of_content_are_not_asked_for(hub: Hub, tmp_path: Path) -> None:
    fetch(hub, tmp_path)
    assert {method for method, _, _ in hub.requests} == {"GET"}


def test_where_links_are_not_allowed_files_are_copied(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("a required privilege is not held by the client")

    monkeypatch.setattr(os, "symlink", refuse)
    folder = fetch(hub, tmp_path)
    assert not (folder / SHARDS[0]).is_symlink() and (folder / SHARDS[0]).read_bytes() == hub.files[SHARDS[0]]


@pytest.mark.parametrize("folder", ["models/tiny", Path("models/tiny"), "/models/tiny", "hf:/org/name"])
def test_a_folder_is_taken_as_it_is(folder: str | Path) -> None:
    assert resolve(folder, SilentProgress()) == Path(folder)


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
