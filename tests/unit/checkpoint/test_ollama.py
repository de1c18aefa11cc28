"""`ollama://name:tag` finds the file in Ollama's store, and nothing else."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from mlcpipe.checkpoint import resolve
from mlcpipe.errors import CheckpointError
from mlcpipe.support.progress import SilentProgress

CONTENT = b"GGUF and so on"
MODEL = "application/vnd.ollama.image.model"


def layer(content: bytes = CONTENT, kind: str = MODEL) -> dict[str, Any]:
    return {"mediaType": kind, "digest": f"sha256:{hashlib.sha256(content).hexdigest()}", "size": len(content)}


def store(folder: Path, name: str, *layers: Any) -> Path:
    """A store with one manifest, and the blob of CONTENT."""
    manifest = folder / "manifests" / name
    manifest.parent.mkdir(parents=True, exist_ok=True)
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": [*layers]}), encoding="utf-8")
    blob = folder / "blobs" / f"sha256-{hashlib.sha256(CONTENT).hexdigest()}"
    blob.parent.mkdir(exist_ok=True)
    blob.write_bytes(CONTENT)
    return blob


@pytest.fixture
def ollama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("spec", "manifest"),
    [
        ("ollama://llama3.2:1b", "registry.ollama.ai/library/llama3.2/1b"),
        ("ollama://llama3.2", "registry.ollama.ai/library/llama3.2/latest"),
        ("ollama://someone/model:q4", "registry.ollama.ai/someone/model/q4"),
        ("ollama://hf.co/org/name-GGUF:Q4_K_M", "hf.co/org/name-GGUF/Q4_K_M"),
    ],
)
def test_the_file_of_a_name(ollama: Path, spec: str, manifest: str) -> None:
    other = layer(b"template", "application/vnd.ollama.image.template")
    blob = store(ollama, manifest, other, layer())
    assert resolve(spec, SilentProgress()) == blob


def test_the_users_store_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    blob = store(tmp_path / ".ollama" / "models", "registry.ollama.ai/library/m/latest", layer())
    assert resolve("ollama://m", SilentProgress()) == blob


@pytest.mark.parametrize(
    "spec", ["ollama://", "ollama://../x", "ollama://a/b/c/d", "ollama://a:b:c", "ollama://a..b", "ollama://a:/"]
)
def test_bad_names(ollama: Path, spec: str) -> None:
    with pytest.raises(CheckpointError, match="bad model name"):
        resolve(spec, SilentProgress())


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([], "one model without an adapter"),
        ([layer(), layer()], "one model without an adapter"),
        ([layer(), layer(b"a", "application/vnd.ollama.image.adapter")], "one model without an adapter"),
        ([3], "one model without an adapter"),
        ([{**layer(), "digest": "sha256:../../x"}], "bad digest"),
        ([{**layer(), "digest": None}], "bad digest"),
        ([layer(b"another")], "cannot read a file"),
    ],
)
def test_damaged_manifests(ollama: Path, layers: list[Any], message: str) -> None:
    store(ollama, "registry.ollama.ai/library/m/latest", *layers)
    with pytest.raises(CheckpointError, match=message):
        resolve("ollama://m", SilentProgress())


def test_a_damaged_file(ollama: Path) -> None:
    store(ollama, "registry.ollama.ai/library/m/latest", layer()).write_bytes(b"GGUF and others")
    with pytest.raises(CheckpointError, match="a file of Ollama's store is damaged"):
        resolve("ollama://m", SilentProgress())


def test_a_model_that_is_not_there(ollama: Path) -> None:
    with pytest.raises(CheckpointError, match="Ollama has no model 'm:1b' on this machine"):
        resolve("ollama://m:1b", SilentProgress())
