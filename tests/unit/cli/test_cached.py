"""`list`, `pull` and `rm`: what the caches hold by the names that people typed, and nothing else is removed."""

from __future__ import annotations

import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

import mlcpipe
from mlcpipe import loading
from mlcpipe.bundle.cached import record_use
from mlcpipe.cli import main
from tests.conftest import Bundles, write_llama

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, demo_bundles: Bundles) -> Path:
    """An empty cache, and a compiler that copies a bundle."""
    made = demo_bundles["q4f16_1"]

    def compile(checkpoint: Path, output: Path, **options: Any) -> None:
        shutil.copytree(made, output)

    monkeypatch.setattr(mlcpipe, "compile", compile)
    monkeypatch.setenv("MLCPIPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path / "cache"


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two models as huggingface_hub stores them: folders of blobs, and links to them."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    for repo in ("models--org--tiny", "models--org--other"):
        blobs, snapshot = (tmp_path / "hub" / repo / name for name in ("blobs", f"snapshots/{COMMIT}"))
        snapshot.mkdir(parents=True)
        blobs.mkdir()
        for name in ("tiny-Q4_0.gguf", "tiny-Q8_0.gguf"):
            (blobs / name[5:7]).write_bytes(bytes(1000))
            (snapshot / name).symlink_to(f"../../blobs/{name[5:7]}")
    return tmp_path / "hub"


def entries(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert main(["list", "--json"]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


def test_models_are_listed_as_they_were_named_and_removed(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = (write_llama(tmp_path / name, tokenizer=True) for name in ("one", "other"))
    (other / "config.json").write_text((other / "config.json").read_text() + " ")
    monkeypatch.chdir(tmp_path)
    assert main(["pull", "one"]) == 0
    assert "Now type:  mlcpipe chat one" in capsys.readouterr().out
    for path in (cache / "models").iterdir():
        os.utime(path, (1, 1))
    loading.prepare_bundle(other, quantization="q8f16_1")
    found = entries(capsys)
    assert [entry["name"] for entry in found] == [str(other), str(one)]
    assert found[1]["target"] == "cpu-native" and found[1]["quantization"] == "q4f16_1" and found[1]["bytes"] > 1 << 20
    loading.prepare_bundle("one")  # a use
    assert [entry["name"] for entry in entries(capsys)][:1] == [str(one)]
    assert main(["list"]) == 0 and "just now" in capsys.readouterr().out
    assert main(["rm", "one", "--yes"]) == 0
    assert [entry["name"] for entry in entries(capsys)] == [str(other)]
    assert one.is_dir() and len(list((cache / "models").iterdir())) == 1
    record_use(cache, "demo", Path(entries(capsys)[0]["bundle"]).name)  # whose name no command takes
    assert main(["list"]) == 0 and capsys.readouterr().out.endswith("Now type:  mlcpipe chat\n")
    assert main(["rm", "--all", "-y"]) == 0 and not list((cache / "bundles").iterdir()) and other.is_dir()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "what to remove; expected a name that `mlcpipe list` shows, or --all; found neither"),
        (["demo", "--all"], "found both"),
        (["dema"], "no such model in the cache; expected demo; found 'dema'; `mlcpipe list` shows all"),
        (["demo"], "nothing was removed; answer y, or add --yes"),
    ],
)
def test_refusals(cache: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    bundle = loading.prepare_bundle()
    assert main(["rm", *arguments]) == 2 and words in capsys.readouterr().err
    assert bundle.is_dir()


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("\n", 2), ("n\n", 2)])
def test_a_question_comes_first(cache: Path, monkeypatch: pytest.MonkeyPatch, answer: str, code: int) -> None:
    bundle = loading.prepare_bundle()
    terminal = io.StringIO(answer)
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stdin", terminal)
    assert main(["rm", "demo"]) == code and bundle.is_dir() == bool(code)


def test_a_bundle_in_the_making_stays(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = loading.prepare_bundle()
    with FileLock(cache / "locks" / bundle.name):
        assert main(["rm", "demo", "-y"]) == 2 and "another run uses the bundle" in capsys.readouterr().err
    assert bundle.is_dir()


def test_links_in_the_cache_are_not_followed(cache: Path, tmp_path: Path) -> None:
    bundle = loading.prepare_bundle()
    moved = bundle.rename(tmp_path / "mine")
    bundle.symlink_to(moved)
    (cache / "models" / "damaged.json").write_text("{")
    assert main(["rm", "--all", "-y"]) == 0
    assert not os.path.lexists(bundle) and (moved / "mlcpipe.json").is_file()


def test_downloads(cache: Path, hub_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those that mlcpipe made; of a tag its files alone."""
    tiny = hub_cache / "models--org--tiny"
    record_use(cache, "hf://org/tiny:Q4_0", "")
    record_use(cache, "hf://org/gone", "")
    found = entries(capsys)
    assert [(entry["name"], entry["bundle"]) for entry in found] == [("hf://org/tiny:Q4_0", None)]
    assert 1000 < found[0]["bytes"] < 1200
    assert main(["rm", "hf://org/tiny@main:Q4_0", "-y"]) == 0
    left = sorted(path.name for path in tiny.rglob("*") if not path.is_dir())
    assert left == ["Q8", "tiny-Q8_0.gguf"]
    record_use(cache, "hf://org/tiny", "")
    assert main(["rm", "--all", "-y"]) == 0
    assert [path.name for path in hub_cache.iterdir()] == ["models--org--other"] and entries(capsys) == []


def test_a_download_that_goes_on_stays(cache: Path, hub_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record_use(cache, "hf://org/tiny", "")
    with FileLock(hub_cache / "models--org--tiny" / "blobs" / ".0123.mlcpipe-partial.mlcpipe-lock"):
        assert main(["rm", "hf://org/tiny", "-y"]) == 2 and "another run downloads" in capsys.readouterr().err
    assert (hub_cache / "models--org--tiny").is_dir()
