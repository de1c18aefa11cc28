"""`hf://org/name:TAG` downloads one of a folder's GGUF files, with its parts and its tower, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mlcpipe.checkpoint.gguf.choice import gguf_models
from mlcpipe.errors import DownloadError

pytest.importorskip("huggingface_hub")
from tests.unit.checkpoint.hub_cases import SPEC, fetch
from tests.unit.checkpoint.hub_server import COMMIT, Hub, serve

pytestmark = pytest.mark.usefixtures("plain_network")
PARTS = [f"Q6_K/tiny-Q6_K-{part:05}-of-00002.gguf" for part in (1, 2)]
TOWER = "mmproj-tiny-Q8_0.gguf"
NAMES = [
    "tiny-Q4_K_M.gguf",
    "tiny.q4_k_s.gguf",
    "tiny-Q4_K.gguf",
    TOWER,
    "README.md",
    "config.json",
    *PARTS,
]


@pytest.fixture
def folder(plain_network: None) -> Iterator[Hub]:
    with serve(Hub({name: name.encode() for name in NAMES})) as hub:
        yield hub


@pytest.mark.parametrize(
    ("tag", "files"),
    [
        ("Q4_K_M", [NAMES[0], TOWER]),
        ("q4_k_m", [NAMES[0], TOWER]),
        ("Q4_K_S", [NAMES[1], TOWER]),
        ("Q4_K", [NAMES[2], TOWER]),
        ("Q6_K", PARTS),  # in another folder than the tower
    ],
)
def test_only_the_named_file_is_downloaded(folder: Hub, tmp_path: Path, tag: str, files: list[str]) -> None:
    path = fetch(folder, tmp_path, f"{SPEC}:{tag}")
    assert path == tmp_path / "cache" / "models--org--tiny-model" / "snapshots" / COMMIT / files[0]
    found = sorted(file.read_bytes().decode() for file in path.parent.glob("*.gguf"))
    assert found == sorted(files)
    assert sorted(name for method, name, _ in folder.requests if method == "GET" and name != "info") == sorted(files)
    folder.requests.clear()
    assert fetch(folder, tmp_path, f"{SPEC}@main:{tag}") == path
    assert folder.requests == [("GET", "info", None)]


def test_without_the_hub_a_complete_copy_is_used(folder: Hub, tmp_path: Path) -> None:
    path = fetch(folder, tmp_path, f"{SPEC}:Q6_K")
    folder.endpoint = "http://127.0.0.1:1"
    assert fetch(folder, tmp_path, f"{SPEC}:Q6_K") == path
    (path.parent / Path(PARTS[1]).name).unlink()
    for tag in ("Q6_K", "Q4_K_M"):
        with pytest.raises(DownloadError, match="cannot reach the hub"):
            fetch(folder, tmp_path, f"{SPEC}:{tag}")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (SPEC, "has GGUF files and no safetensors.*add the tag: hf://org/tiny-model:Q4_K_M"),
        (f"{SPEC}:Q2_K", "no model of this folder.*found 'Q6_K/tiny"),
        (f"{SPEC}:Q8_0", "no model of this folder"),
        (f"{SPEC}:tiny", "several models.*give a longer tag"),
    ],
)
def test_a_tag_must_name_one_model(folder: Hub, tmp_path: Path, spec: str, message: str) -> None:
    with pytest.raises(DownloadError, match=message):
        fetch(folder, tmp_path, spec)
    assert [name for _, name, _ in folder.requests] == ["info"]


def test_a_missing_part(folder: Hub, tmp_path: Path) -> None:
    del folder.files[PARTS[1]]
    with pytest.raises(DownloadError, match="lacks 'Q6_K/tiny-Q6_K-00002-of-00002.gguf'"):
        fetch(folder, tmp_path, f"{SPEC}:Q6_K")


def test_names_that_leave_the_folder_are_no_models() -> None:
    names = [
        "../Q4_0.gguf",
        "/Q4_0.gguf",
        "a/../Q4_0.gguf",
        "a//Q4_0.gguf",
        ".Q4_0.gguf",
        "a\\Q4_0.gguf",
        "Q4_0.gguf\n",
        "C:Q4_0.gguf",
    ]
    assert gguf_models(names) == []
    assert gguf_models(["a/b-Q4_0.gguf"], "Q4_0") == [["a/b-Q4_0.gguf"]]
